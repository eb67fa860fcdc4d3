// A linear layer on packed weights, which are read from memory once and used for all rows of x.
//
// M rows of x, K inputs, N outputs. Weights are words of 32 bits [ceil(N / 16)][words][16]; a word
// holds 1, 2 or 4 inputs of an output (float, bfloat16, int8). What is missing to the last word, or
// to sixteen outputs, is zero.
#pragma once

#include <type_traits>
#include <vector>

#include "parallel.h"
#include "vector.h"

namespace reblock {

// Rows of a tile at most: where it is the only one, and where there are several. A tile of more than
// kTileOfSeveral rows takes its two sums one after the other, which pays only where it saves another
// tile the reading of the weights from memory.
#if defined(__AVX512F__) && defined(__AVX512BW__)
constexpr int kTile = 16;
constexpr int kTileOfSeveral = 12;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int kTile = 6;
constexpr int kTileOfSeveral = 6;
#else
constexpr int kTile = 3;
constexpr int kTileOfSeveral = 3;
#endif
constexpr int kDepth = 256;  // inputs taken at once: a tile of x and a panel stay in the L1 cache
constexpr int64_t kBlockFloats = 128 * 1024;  // of x, which stays in the L2 cache
constexpr int64_t kMaxRows = 512;
constexpr int kAheadBytes = 4096;  // processors do not fetch ahead over the end of a page

struct LinearShape {
  int64_t rows;
  int64_t inputs;  // of a packed row: words times what a word holds
  int64_t outputs;
  int64_t panels() const { return (outputs + kPanel - 1) / kPanel; }
  int64_t tiles() const {
    return rows <= kTile ? 1 : (rows + kTileOfSeveral - 1) / kTileOfSeveral;
  }
  // Rows in a tile: as even as can be, so that the last one wastes little.
  int64_t tile_rows() const { return (rows + tiles() - 1) / tiles(); }
};

// Writes x [M, K] as [tiles][inputs][tile_rows]; what is not in x is zero.
template <class X>
void pack_rows(const X* x, int64_t given, const LinearShape& shape, float* packed) {
  int64_t height = shape.tile_rows(), inputs = shape.inputs;
  auto pack = [&](int64_t tile) {
    float* to = packed + tile * inputs * height;
    int64_t first = tile * height;
    int64_t real = shape.rows - first < height ? shape.rows - first : height;
    if (real < height || given < inputs) std::memset(to, 0, inputs * height * sizeof(float));
    // A few inputs of all rows at a time, so that what is written stays in the L1 cache.
    for (int64_t from = 0; from < given; from += kPanel) {
      int64_t end = from + kPanel < given ? from + kPanel : given, m = 0;
      for (; m + 4 <= real; m += 4) {
        const X* rows = x + (first + m) * given;
        int64_t k = from;
        for (; k + 4 <= end; k += 4) transpose(rows + k, given, to + k * height + m, height);
        for (; k < end; k++)
          for (int64_t i = 0; i < 4; i++) to[k * height + m + i] = to_float(rows[i * given + k]);
      }
      for (; m < real; m++)
        for (int64_t k = from; k < end; k++)
          to[k * height + m] = to_float(x[(first + m) * given + k]);
    }
  };
  if (shape.rows * inputs < 16384)
    for (int64_t tile = 0; tile < shape.tiles(); tile++) pack(tile);
  else
    share_out(shape.tiles(), pack);
}

// sums [kRows][16] += a tile of x times `num_words` rows of words
template <class W>
using AddTile = void (*)(const float* x, const W* w, int64_t num_words, float* sums);

template <class W, int kRows, int kAhead>
void add_tile(const float* x, const W* w, int64_t num_words, float* sums) {
  Vec out[kRows][kVectors];
  std::memcpy(&out, sums, sizeof out);
  multiply<kRows, 2, kAhead>(x, kRows, 1, w, num_words, out);
  std::memcpy(sums, &out, sizeof out);
}

template <class W, int kAhead, int kRows = kTile>
AddTile<W> add_tile_of(int64_t rows) {
  if constexpr (kRows > 1)
    return rows == kRows ? add_tile<W, kRows, kAhead> : add_tile_of<W, kAhead, kRows - 1>(rows);
  else
    return add_tile<W, 1, kAhead>;
}

// Whether two panels of a tile fit the registers together. What is loaded of x is then used twice,
// where a processor with two multiplications a clock would wait for as many loads and one more.
constexpr bool kHasPairs = kVectors == 1;

// As add_tile, with the panels w[0] and w[1], whose sums lie `apart`; the same numbers in the same
// order.
using AddPair = void (*)(const float* x, const float* const* w, int64_t inputs, float* sums,
                         int64_t apart);

template <int kRows>
void add_pair(const float* x, const float* const* w, int64_t inputs, float* sums, int64_t apart) {
  for (int64_t first = 0; first < 2; first++) {
    Vec out[kRows][2] = {};
    for (int64_t k = first; k < inputs; k += 2) {
      Vec weights[2] = {load(w[0] + k * kPanel), load(w[1] + k * kPanel)};
      REBLOCK_UNROLL
      for (int m = 0; m < kRows; m++) {
        float input = x[k * kRows + m];
        REBLOCK_UNROLL
        for (int p = 0; p < 2; p++) out[m][p] += weights[p] * input;
      }
    }
    REBLOCK_UNROLL
    for (int m = 0; m < kRows; m++)
      REBLOCK_UNROLL
      for (int p = 0; p < 2; p++) {
        float* to = sums + p * apart + m * kPanel;
        store(to, load(to) + out[m][p]);
      }
  }
}

template <int kRows = kTileOfSeveral>
AddPair add_pair_of(int64_t rows) {
  if constexpr (kRows > 1)
    return rows == kRows ? add_pair<kRows> : add_pair_of<kRows - 1>(rows);
  else
    return add_pair<1>;
}

template <class W>
struct Linear {
  static constexpr int kInputs = kInputsOfWord<W>;

  const float* x;  // as pack_rows writes it
  const W* packed;
  const float* scales;  // [N], or null
  const float* bias;    // [N], or null
  LinearShape shape;

  // The same weights as floats, where several tiles use them.
  static const float* widened(const W* w, int64_t num_words, float* room) {
    for (int64_t i = 0; i < num_words; i++, w += kPanel * kInputs) {
      __builtin_prefetch(reinterpret_cast<const char*>(w) + kAheadBytes);
      for (int v = 0; v < kVectors; v++) {
        WordVec words = load_words(w + v * kLanes * kInputs);
        each_of_word<W>([&](auto index) {
          store(room + (i * kInputs + index) * kPanel + v * kLanes, take_apart<index>(w, words));
        });
      }
    }
    return room;
  }

  // Asks for the `part`-th of `parts` parts of a chunk of weights, kDepth inputs at most, into the L2
  // cache: the L1 cache is full of what is used meanwhile.
  static void fetch(const W* chunk, int64_t inputs, int64_t part, int64_t parts) {
    auto at = reinterpret_cast<const char*>(chunk);
    int64_t depth = inputs < kDepth ? inputs : kDepth;
    int64_t lines = (depth * kPanel * int64_t(sizeof(W)) + 63) / 64;
    for (int64_t i = lines * part / parts; i < lines * (part + 1) / parts; i++)
      __builtin_prefetch(at + i * 64, 0, 2);
  }

  // Adds the product of inputs [first, last) to the sums [count][tiles][tile rows][16] of `count`
  // panels, one or two.
  void accumulate(int64_t panel, int64_t count, int64_t first, int64_t last, float* sums) const {
    int64_t inputs = shape.inputs, tiles = shape.tiles(), height = shape.tile_rows();
    // Several tiles find the weights in the cache, where what comes later would only take room.
    AddTile<W> add = tiles > 1 ? add_tile_of<W, 0>(height) : add_tile_of<W, kAheadBytes>(height);
    AddTile<float> add_wide = add_tile_of<float, 0>(height);
    AddPair add_both = kHasPairs ? add_pair_of(height) : nullptr;
    constexpr bool kIsFloat = std::is_same_v<W, float>;
    alignas(64) float room[2][kIsFloat ? 1 : kDepth * kPanel];
    for (int64_t k = first; k < last; k += kDepth) {
      int64_t depth = last - k < kDepth ? last - k : kDepth;
      const W* w = packed + (panel * inputs + k) * kPanel;
      // Where it goes on: in these panels, else at the same inputs of the next ones.
      bool is_end = k + kDepth >= last;
      int64_t next = is_end ? panel + count : panel, next_k = is_end ? first : k + kDepth;
      const float* wide[2] = {};
      for (int64_t p = 0; tiles > 1 && p < count; p++)
        if constexpr (kIsFloat)
          wide[p] = w + p * inputs * kPanel;
        else
          wide[p] = widened(w + p * inputs * kPanel, depth / kInputs, room[p]);
      for (int64_t t = 0; t < tiles; t++) {
        const float* tile = x + (t * inputs + k) * height;
        float* to = sums + t * height * kPanel;
        for (int64_t p = 0; tiles > 1 && p < count && next + p < shape.panels(); p++)
          fetch(packed + ((next + p) * inputs + next_k) * kPanel, last - next_k, t, tiles);
        if (count > 1)
          add_both(tile, wide, depth, to, tiles * height * kPanel);
        else if (tiles > 1)
          add_wide(tile, wide[0], depth, to);
        else
          add(tile, w, depth / kInputs, to);
      }
    }
  }

  template <class Y>
  void finish(int64_t panel, const float* sums, Y* y) const {
    int64_t first = panel * kPanel;
    int64_t count = shape.outputs - first < kPanel ? shape.outputs - first : kPanel;
    float scale[kPanel], shift[kPanel];
    for (int64_t n = 0; n < count; n++) {
      scale[n] = scales == nullptr ? 1.0f : scales[first + n];
      shift[n] = bias == nullptr ? 0.0f : bias[first + n];
    }
    for (int64_t m = 0; m < shape.rows; m++)
      for (int64_t n = 0; n < count; n++)
        assign(y + m * shape.outputs + first + n, sums[m * kPanel + n] * scale[n] + shift[n]);
  }

  // Computes outputs [first * 16, last * 16) of all rows.
  template <class Y>
  void run(int64_t first, int64_t last, Y* y) const {
    static thread_local Scratch scratch;
    int64_t rows = shape.tiles() * shape.tile_rows(), size = rows * kPanel;
    int64_t block = kBlockFloats / rows / kDepth * kDepth;
    block = block < kDepth ? kDepth : block;
    float* sums = scratch.room((last - first) * size);
    std::memset(sums, 0, (last - first) * size * sizeof(float));
    for (int64_t k = 0; k < shape.inputs; k += block)
      for (int64_t panel = first, count; panel < last; panel += count) {
        int64_t end = k + block < shape.inputs ? k + block : shape.inputs;
        count = kHasPairs && shape.tiles() > 1 && panel + 1 < last ? 2 : 1;
        accumulate(panel, count, k, end, sums + (panel - first) * size);
      }
    for (int64_t panel = first; panel < last; panel++)
      finish(panel, sums + (panel - first) * size, y);
  }
};

// What a layer multiplies x with, and where its results go.
template <class X, class W>
struct LinearLayer {
  const W* packed;
  const float* scales;  // [N], or null
  const float* bias;    // [N], or null
  int64_t outputs;
  X* y;  // [M, N]
};

// y [M, N] of each layer = x [M, K] times its packed weights, scaled and shifted.
//
// Layers of one x are taken together: x is packed once, and threads wait for each other once.
template <class X, class W>
void linear(const X* x, int64_t given, int64_t all_rows, int64_t inputs,
            const std::vector<LinearLayer<X, W>>& layers) {
  static thread_local Scratch scratch;
  int64_t panels = 0;
  for (const auto& layer : layers) panels += (layer.outputs + kPanel - 1) / kPanel;
  // Pieces small enough that no thread is left with much when the others are done.
  int64_t piece = panels / (num_threads() * 8);
  piece = piece < 1 ? 1 : piece;
  if (kHasPairs && all_rows > kTile) piece += piece % 2;
  for (int64_t row = 0; row < all_rows; row += kMaxRows) {
    int64_t rows = all_rows - row < kMaxRows ? all_rows - row : kMaxRows;
    LinearShape part{rows, inputs, 0};
    const float* ready;
    if (sizeof(X) == 4 && rows == 1 && given == inputs) {
      ready = reinterpret_cast<const float*>(x + row * given);
    } else {
      float* room = scratch.room(part.tiles() * part.tile_rows() * inputs);
      pack_rows(x + row * given, given, part, room);
      ready = room;
    }
    share_out((panels + piece - 1) / piece, [&](int64_t index) {
      // Of all panels in a row, those of the layers one behind the other.
      int64_t first = index * piece, last = first + piece < panels ? first + piece : panels;
      for (const auto& layer : layers) {
        LinearShape shape{rows, inputs, layer.outputs};
        int64_t count = shape.panels(), end = last < count ? last : count;
        if (first < end)
          Linear<W>{ready, layer.packed, layer.scales, layer.bias, shape}.run(
              first, end, layer.y + row * layer.outputs);
        first = first > count ? first - count : 0, last = last > count ? last - count : 0;
      }
    });
  }
}

}  // namespace reblock
