// A linear layer on packed weights, which are read from memory once and used for all rows of x.
//
// M rows of x, K inputs, N outputs. Weights are words of 32 bits [ceil(N / 16)][words][16]; a word
// holds 1, 2 or 4 inputs of an output (float, bfloat16, int8). What is missing to the last word, or
// to sixteen outputs, is zero.
#pragma once

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

  // Adds the product of inputs [first, last) to the sums [tiles][tile rows][16] of one panel.
  void accumulate(int64_t panel, int64_t first, int64_t last, float* sums) const {
    int64_t inputs = shape.inputs, tiles = shape.tiles(), height = shape.tile_rows();
    // Several tiles find the weights in the cache, where what comes later would only take room.
    AddTile<W> add = tiles > 1 ? add_tile_of<W, 0>(height) : add_tile_of<W, kAheadBytes>(height);
    AddTile<float> add_wide = add_tile_of<float, 0>(height);
    alignas(64) float room[sizeof(W) < 4 ? kDepth * kPanel : 1];
    for (int64_t k = first; k < last; k += kDepth) {
      int64_t depth = last - k < kDepth ? last - k : kDepth;
      const W* w = packed + (panel * inputs + k) * kPanel;
      // Where it goes on: in this panel, else at the same inputs of the next one.
      bool is_end = k + kDepth >= last;
      const W* next = is_end ? packed + ((panel + 1) * inputs + first) * kPanel : w + kDepth * kPanel;
      bool is_last = is_end && panel + 1 == shape.panels();
      bool is_wide = sizeof(W) < 4 && tiles > 1;
      const float* wide = is_wide ? widened(w, depth / kInputs, room) : nullptr;
      for (int64_t t = 0; t < tiles; t++) {
        const float* tile = x + (t * inputs + k) * height;
        if (tiles > 1 && !is_last) fetch(next, last - (is_end ? first : k + kDepth), t, tiles);
        if (is_wide)
          add_wide(tile, wide, depth, sums + t * height * kPanel);
        else
          add(tile, w, depth / kInputs, sums + t * height * kPanel);
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
      for (int64_t panel = first; panel < last; panel++) {
        int64_t end = k + block < shape.inputs ? k + block : shape.inputs;
        accumulate(panel, k, end, sums + (panel - first) * size);
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
