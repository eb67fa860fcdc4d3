// Attention for many queries, as in a chunk of a prompt: sixteen queries in the lanes of a vector.
//
// Keys and values need no rearranging, and nothing is summed across lanes:
//
//   scores [key][16]  += key [key][d] * queries [d][16]      for one panel of sixteen queries
//   out [e][16]       += value [key][e] * weights [key][16]
#pragma once

#include "cache.h"
#include "parallel.h"

namespace reblock {

template <class C>
struct ManyQueries {
  static constexpr int64_t kKeys = 64;      // taken at once: they stay in the L1 cache
  static constexpr int64_t kQueries = 128;  // of one task, which share what is read
  static constexpr int kRows = 8 / kVectors;

  const AttentionShape& shape;
  const Cache<C>& cache;

  // Where the queries of a panel stand, relative to the row's first token.
  struct Panel {
    alignas(64) int32_t position[kPanel];
    alignas(64) int32_t first_seen[kPanel];
    alignas(64) float top[kPanel];
    alignas(64) float total[kPanel];
  };

  int64_t tokens_of_task() const {
    int64_t tokens = kQueries / shape.groups();
    return tokens < 1 ? 1 : tokens;
  }

  // to[j * kPanel] += x [count rows] times w [depth][16]
  static void product(const float* x, int64_t step, int64_t row, const float* w, int64_t depth,
                      int64_t count, float* to) {
    int64_t j = 0;
    for (; j + kRows <= count; j += kRows)
      part<kRows>(x + j * row, step, row, w, depth, to + j * kPanel);
    for (; j < count; j++) part<1>(x + j * row, step, row, w, depth, to + j * kPanel);
  }

  template <int kCount>
  static void part(const float* x, int64_t step, int64_t row, const float* w, int64_t depth,
                   float* to) {
    Vec out[kCount][kVectors];
    std::memcpy(&out, to, sizeof out);
    multiply<kCount, 1, 0>(x, step, row, w, depth, out);
    std::memcpy(to, &out, sizeof out);
  }

  // Turns scores [count][16] into weights and scales earlier sums of the output accordingly. The
  // first key stands `at` from the row's first token.
  void normalize(float* scores, int64_t count, int32_t at, bool is_masked, Panel& panel,
                 float* out) const {
    for (int v = 0; v < kVectors; v++) {
      IntVec position, first_seen;
      std::memcpy(&position, panel.position + v * kLanes, sizeof position);
      std::memcpy(&first_seen, panel.first_seen + v * kLanes, sizeof first_seen);
      Vec top = load(panel.top + v * kLanes), best = top;
      for (int64_t j = 0; j < count; j++) {
        float* at_key = scores + j * kPanel + v * kLanes;
        Vec score = load(at_key);
        if (shape.softcap > 0) score = soften(score, shape.softcap);
        if (is_masked) {
          IntVec key = IntVec{} + (at + int32_t(j));
          score = (key <= position) & (key >= first_seen) ? score : splat(kLowest);
        }
        if (is_masked || shape.softcap > 0) store(at_key, score);
        best = max(best, score);
      }
      Vec added = {};
      for (int64_t j = 0; j < count; j++) {
        float* at_key = scores + j * kPanel + v * kLanes;
        Vec score = load(at_key), weight = exp(score - best);
        if (is_masked) weight = score > splat(kLowest) ? weight : splat(0.0f);
        store(at_key, weight);
        added += weight;
      }
      Vec keep = exp(top - best);
      store(panel.top + v * kLanes, best);
      store(panel.total + v * kLanes, load(panel.total + v * kLanes) * keep + added);
      for (int64_t e = 0; e < shape.value_size; e++) {
        float* at_value = out + e * kPanel + v * kLanes;
        store(at_value, load(at_value) * keep);
      }
    }
  }

  // Queries [panels][key size][16] of tokens [first, last) of one row and key-value head, scaled.
  template <class X>
  void pack(const Strided<X>& query, int64_t row, int64_t head, int64_t first, int64_t count,
            float* to, Panel* panels) const {
    int64_t groups = shape.groups();
    for (int64_t i = 0; i < (count + kPanel - 1) / kPanel * kPanel; i++) {
      int64_t q = i < count ? i : count - 1, t = first + q / groups;
      const X* from = query.at(row, head * groups + q % groups, t);
      float* lane = to + i / kPanel * kPanel * shape.key_size + i % kPanel;
      for (int64_t d = 0; d < shape.key_size; d++)
        lane[d * kPanel] = to_float(from[d]) * shape.scale;
      Panel& panel = panels[i / kPanel];
      int64_t start = shape.start[row];
      panel.position[i % kPanel] = int32_t(t);
      panel.first_seen[i % kPanel] = int32_t(shape.first_seen(start + t) - start);
      panel.top[i % kPanel] = kLowest;
      panel.total[i % kPanel] = 0.0f;
    }
  }

  // Divides by the sum of the weights and writes out [T][H][value size].
  template <class X>
  void finish(int64_t row, int64_t head, int64_t first, int64_t count, const Panel* panels,
              const float* sums, X* out) const {
    int64_t groups = shape.groups();
    for (int64_t q = 0; q < count; q++) {
      const Panel& panel = panels[q / kPanel];
      float total = panel.total[q % kPanel], factor = 1.0f;
      int64_t query_head = head * groups + q % groups;
      if (shape.sinks != nullptr) {
        float sink = shape.sinks[query_head], top = panel.top[q % kPanel];
        float now = sink > top ? sink : top;
        factor = exp(splat(top - now))[0];
        total = total * factor + exp(splat(sink - now))[0];
      }
      X* to = out + ((row * shape.tokens + first + q / groups) * shape.heads + query_head) *
                        shape.value_size;
      const float* from = sums + q / kPanel * kPanel * shape.value_size + q % kPanel;
      for (int64_t e = 0; e < shape.value_size; e++)
        assign(to + e, from[e * kPanel] * (factor / total));
    }
  }

  static const float* widened(const float* from, int64_t, float*) { return from; }
  template <class T>
  static const float* widened(const T* from, int64_t count, float* room) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store(room + i, load(from + i));
    convert(room + i, from + i, count - i);
    return room;
  }

  // Writes the output of the real tokens [first, last) of one row and key-value head.
  template <class X>
  void attend(const Strided<X>& query, int64_t row, int64_t head, int64_t first, int64_t last,
              X* out) const {
    int64_t count = (last - first) * shape.groups(), num_panels = (count + kPanel - 1) / kPanel;
    int64_t key_size = shape.key_size, value_size = shape.value_size;
    int64_t panel_floats = int64_t(sizeof(Panel) / sizeof(float));
    static thread_local Scratch scratch;
    float* room = scratch.room(num_panels * (panel_floats + kPanel * (key_size + value_size)) +
                                 kKeys * (kPanel + key_size + value_size));
    Panel* panels = reinterpret_cast<Panel*>(room);
    float* queries = room + num_panels * panel_floats;
    float* sums = queries + num_panels * kPanel * key_size;
    float* scores = sums + num_panels * kPanel * value_size;
    float* key_room = scores + kKeys * kPanel;
    float* value_room = key_room + kKeys * key_size;
    pack(query, row, head, first, count, queries, panels);
    std::memset(sums, 0, num_panels * kPanel * value_size * sizeof(float));
    int64_t start = shape.start[row], end = start + last;
    for (int64_t at = shape.first_seen(start + first); at < end;) {
      Run<C> run = cache.run(row, head, start, at, end);
      int64_t keys = run.length < kKeys ? run.length : kKeys;
      const float* key = widened(run.keys, keys * key_size, key_room);
      const float* value = widened(run.values, keys * value_size, value_room);
      int32_t relative = int32_t(at - start);
      for (int64_t p = 0; p < num_panels; p++) {
        Panel& panel = panels[p];
        int32_t highest = relative + int32_t(keys) - 1;
        if (relative > panel.position[kPanel - 1] || highest < panel.first_seen[0]) continue;
        bool is_masked =
            highest > panel.position[0] || relative < panel.first_seen[kPanel - 1];
        std::memset(scores, 0, keys * kPanel * sizeof(float));
        product(key, 1, key_size, queries + p * kPanel * key_size, key_size, keys, scores);
        float* out_of = sums + p * kPanel * value_size;
        normalize(scores, keys, relative, is_masked, panel, out_of);
        product(value, value_size, 1, scores, keys, value_size, out_of);
      }
      at += keys;
    }
    finish(row, head, first, count, panels, sums, out);
  }
};

}  // namespace reblock
