// Attention for few queries, as in a decoder: one key after the other.
//
// The G query heads of a key-value head are taken together, so a key is read once for all of them.
// Long sequences are cut into ranges, so that several threads work on one; `merge` joins them.
#pragma once

#include "cache.h"
#include "parallel.h"

namespace reblock {

template <class C>
struct FewQueries {
  // Keys that are scored before their values are used. Many, so that memory is read in long runs;
  // fewer where values are gone over several times and have to stay in the L1 cache meanwhile.
  static constexpr int64_t kKeys = 256, kFewerKeys = 64;

  // Vectors of a value that are taken at once: as many as the registers hold for four queries.
  static constexpr int kWide = kLanes == 16 ? 4 : 2;

  const AttentionShape& shape;
  const Cache<C>& cache;
  int64_t key_stride = shape.padded_key();
  // A partial result: the output, the sum of the weights, the highest score.
  int64_t stride = shape.padded_value() + kPanel;
  int64_t total_at = shape.padded_value(), top_at = shape.padded_value() + 1;

  bool is_wide() const { return shape.value_size > kWide * kLanes; }

  static void fetch(const C* from, int64_t count) {
    for (int64_t i = 0; i < count; i += 64 / int64_t(sizeof(C))) __builtin_prefetch(from + i);
  }

  // Writes the scores of kQueries queries for `count` keys to to[q * kKeys + key].
  template <int kQueries>
  void score(const float* queries, const Run<C>& run, int64_t count, float* to) const {
    constexpr int kTogether = 8 / kQueries;
    int64_t size = shape.key_size, whole = size / kLanes * kLanes;
    for (int64_t first = 0; first < count; first += kTogether) {
      Vec total[8] = {};
      const C* keys[kTogether];
      for (int j = 0; j < kTogether; j++) {
        int64_t key = first + j < count ? first + j : count - 1;
        keys[j] = run.keys + key * size;
        // Values that are read row after row the processor fetches by itself, and does it better.
        if (is_wide())
          fetch(run.values + key * shape.value_size, shape.value_size);
      }
      auto step = [&](int64_t d, auto take) __attribute__((always_inline)) {
        Vec query[kQueries];
        REBLOCK_UNROLL
        for (int q = 0; q < kQueries; q++) query[q] = load(queries + q * key_stride + d);
        REBLOCK_UNROLL
        for (int j = 0; j < kTogether; j++) {
          Vec key = take(keys[j] + d);
          REBLOCK_UNROLL
          for (int q = 0; q < kQueries; q++) total[j * kQueries + q] += key * query[q];
        }
      };
      for (int64_t d = 0; d < whole; d += kLanes) step(d, [](const C* at) { return load(at); });
      if (whole < size) step(whole, [&](const C* at) { return load_some(at, size - whole); });
      Quad scores[2] = {sums(total[0], total[1], total[2], total[3]),
                        sums(total[4], total[5], total[6], total[7])};
      REBLOCK_UNROLL
      for (int j = 0; j < kTogether; j++)
        REBLOCK_UNROLL
        for (int q = 0; q < kQueries; q++) {
          int i = j * kQueries + q;
          if (first + j < count) to[q * kKeys + first + j] = scores[i / 4][i % 4];
        }
    }
  }

  // Adds the values of `count` keys, weighted, to the outputs of kQueries queries.
  template <int kQueries>
  void weigh(const float* weights, const Run<C>& run, int64_t count, float* out) const {
    int64_t size = shape.value_size, e = 0;
    auto whole = [](const C* at) { return load(at); };
    for (; e + kWide * kLanes <= size; e += kWide * kLanes)
      weigh_part<kQueries, kWide>(weights, run.values + e, count, out + e, whole);
    for (; e + kLanes <= size; e += kLanes)
      weigh_part<kQueries, 1>(weights, run.values + e, count, out + e, whole);
    if (e < size)
      weigh_part<kQueries, 1>(weights, run.values + e, count, out + e,
                              [&](const C* at) { return load_some(at, size - e); });
  }

  template <int kQueries, int kVecs, class Take>
  REBLOCK_INLINE void weigh_part(const float* weights, const C* values, int64_t count, float* out,
                                 const Take& take) const {
    Vec total[kQueries][kVecs];
    REBLOCK_UNROLL
    for (int q = 0; q < kQueries; q++)
      REBLOCK_UNROLL
      for (int v = 0; v < kVecs; v++) total[q][v] = load(out + q * stride + v * kLanes);
    for (int64_t key = 0; key < count; key++) {
      Vec value[kVecs];
      REBLOCK_UNROLL
      for (int v = 0; v < kVecs; v++) value[v] = take(values + key * shape.value_size + v * kLanes);
      REBLOCK_UNROLL
      for (int q = 0; q < kQueries; q++)
        REBLOCK_UNROLL
        for (int v = 0; v < kVecs; v++) total[q][v] += value[v] * weights[q * kKeys + key];
    }
    REBLOCK_UNROLL
    for (int q = 0; q < kQueries; q++)
      REBLOCK_UNROLL
      for (int v = 0; v < kVecs; v++) store(out + q * stride + v * kLanes, total[q][v]);
  }

  // Turns `count` scores of one query into weights; those outside [low, high) count for nothing.
  void normalize(float* scores, int64_t count, int64_t low, int64_t high, float* partial) const {
    if (shape.softcap > 0)
      for (int64_t i = 0; i < count; i += kLanes)
        store(scores + i, soften(load(scores + i), shape.softcap));
    for (int64_t i = 0; i < low; i++) scores[i] = kLowest;
    int64_t whole = (count + kLanes - 1) / kLanes * kLanes;
    for (int64_t i = high; i < whole; i++) scores[i] = kLowest;
    float& top = partial[top_at];
    Vec best = splat(top);
    for (int64_t i = 0; i < whole; i += kLanes) best = max(best, load(scores + i));
    float now = highest(best), keep = top < now ? exp(splat(top - now))[0] : 1.0f;
    Vec added = {};
    for (int64_t i = 0; i < whole; i += kLanes) {
      Vec score = load(scores + i);
      Vec weight = score > splat(kLowest) ? exp(score - now) : splat(0.0f);
      store(scores + i, weight);
      added += weight;
    }
    top = now;
    if (keep != 1.0f)
      for (int64_t e = 0; e <= total_at; e++) partial[e] *= keep;
    partial[total_at] += sum(added);
  }

  static int64_t within(int64_t value, int64_t highest) {
    return value < 0 ? 0 : value < highest ? value : highest;
  }

  // Takes `count` keys from position `at` on for the queries from the `first`-th on.
  template <int kQueries>
  void take(const Run<C>& run, int64_t count, int64_t at, int64_t start, int64_t first,
            const float* queries, float* partial) const {
    alignas(64) float scores[kQueries * kKeys];
    score<kQueries>(queries + first * key_stride, run, count, scores);
    for (int64_t q = 0; q < kQueries; q++) {
      int64_t position = start + (first + q) / shape.groups();
      normalize(scores + q * kKeys, count, within(shape.first_seen(position) - at, count),
                within(position + 1 - at, count), partial + (first + q) * stride);
    }
    weigh<kQueries>(scores, run, count, partial + first * stride);
  }

  // Writes what positions [first, last) give for the queries [T][G][padded key size] of one row and
  // key-value head, as one partial result for each.
  void attend(int64_t row, int64_t head, int64_t first, int64_t last, const float* queries,
              float* partial) const {
    int64_t count = shape.lengths[row] * shape.groups(), start = shape.start[row];
    std::memset(partial, 0, count * stride * sizeof(float));
    for (int64_t q = 0; q < count; q++) partial[q * stride + top_at] = kLowest;
    for (int64_t at = first; at < last;) {
      Run<C> run = cache.run(row, head, start, at, last);
      int64_t most = is_wide() ? kFewerKeys : kKeys;
      int64_t keys = run.length < most ? run.length : most, q = 0;
      for (; q + 4 <= count; q += 4) take<4>(run, keys, at, start, q, queries, partial);
      for (; q + 2 <= count; q += 2) take<2>(run, keys, at, start, q, queries, partial);
      for (; q < count; q++) take<1>(run, keys, at, start, q, queries, partial);
      at += keys;
    }
  }

  // Joins the partial results of one query, `step` apart, into out [value size].
  template <class X>
  void merge(const float* partials, int64_t count, int64_t step, const float* sink, X* out) const {
    float top = sink == nullptr ? kLowest : *sink;
    for (int64_t i = 0; i < count; i++)
      top = partials[i * step + top_at] > top ? partials[i * step + top_at] : top;
    float total = sink == nullptr ? 0.0f : exp(splat(*sink - top))[0];
    float joined[kPanel];
    static thread_local Scratch scratch;
    float* factors = scratch.room(count);
    for (int64_t i = 0; i < count; i++) {
      factors[i] = exp(splat(partials[i * step + top_at] - top))[0];
      total += factors[i] * partials[i * step + total_at];
    }
    for (int64_t e = 0; e < shape.value_size; e += kPanel) {
      std::memset(joined, 0, sizeof joined);
      for (int64_t i = 0; i < count; i++)
        for (int64_t lane = 0; lane < kPanel; lane++)
          joined[lane] += factors[i] * partials[i * step + e + lane];
      for (int64_t lane = 0; lane < kPanel && e + lane < shape.value_size; lane++)
        assign(out + e + lane, joined[lane] / total);
    }
  }
};

}  // namespace reblock
