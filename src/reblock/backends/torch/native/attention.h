// Attention on a cache: write the new tokens, then attend to what each token sees.
#pragma once

#include <memory>
#include <vector>

#include "few_queries.h"
#include "many_queries.h"

namespace reblock {

constexpr int64_t kFew = 8;              // queries of a key-value head, up to which they are few
constexpr int64_t kRangeKeys = 256;      // a range of keys is this long
constexpr int64_t kMostRanges = 64;      // or longer, so that there are not more of them
constexpr int64_t kSmallWrite = 16384;   // elements, up to which one thread writes them

// The ranges of one row's keys. They depend on the row alone, so its answer does not change with
// what else is in the batch.
struct Ranges {
  int64_t row, first, length, count, index;
};

inline std::vector<Ranges> cut(const AttentionShape& shape) {
  std::vector<Ranges> out;
  int64_t index = 0;
  for (int64_t row = 0; row < shape.real_rows; row++) {
    int64_t first = shape.first_seen(shape.start[row]);
    int64_t keys = shape.start[row] + shape.lengths[row] - first;
    int64_t length = (keys + kMostRanges - 1) / kMostRanges;
    length = length < kRangeKeys ? kRangeKeys : (length + kPanel - 1) / kPanel * kPanel;
    int64_t count = (keys + length - 1) / length;
    out.push_back({row, first, length, count, index});
    index += count;
  }
  return out;
}

template <class C, class X>
void attend_few(const AttentionShape& shape, const Cache<C>& cache, const Strided<X>& query,
                X* out) {
  FewQueries<C> few{shape, cache};
  int64_t groups = shape.groups(), most = shape.tokens * groups, heads = shape.kv_heads;
  std::vector<Ranges> ranges = cut(shape);
  int64_t num_ranges = ranges.back().index + ranges.back().count;
  static thread_local Scratch scratch;
  int64_t query_floats = shape.real_rows * heads * few.key_stride;
  float* queries = scratch.room(most * (query_floats + num_ranges * heads * few.stride));
  float* partials = queries + most * query_floats;
  for (int64_t row = 0; row < shape.real_rows; row++)
    for (int64_t head = 0; head < shape.heads; head++)
      for (int64_t t = 0; t < shape.lengths[row]; t++) {
        float* to = queries + ((row * heads + head / groups) * most + t * groups + head % groups) *
                                  few.key_stride;
        const X* from = query.at(row, head, t);
        for (int64_t d = 0; d < few.key_stride; d++)
          to[d] = d < shape.key_size ? to_float(from[d]) * shape.scale : 0.0f;
      }
  std::vector<int32_t> row_of(num_ranges);
  for (const Ranges& of : ranges)
    for (int64_t i = 0; i < of.count; i++) row_of[of.index + i] = int32_t(of.row);
  std::unique_ptr<std::atomic<int64_t>[]> left(new std::atomic<int64_t>[shape.real_rows * heads]);
  for (const Ranges& of : ranges)
    for (int64_t head = 0; head < heads; head++) left[of.row * heads + head] = of.count;
  share_out(num_ranges * heads, [&](int64_t task) {
    int64_t index = task / heads, head = task % heads;
    const Ranges& of = ranges[row_of[index]];
    int64_t first = of.first + (index - of.index) * of.length;
    int64_t end = shape.start[of.row] + shape.lengths[of.row];
    int64_t last = first + of.length < end ? first + of.length : end;
    int64_t size = most * few.stride;
    few.attend(of.row, head, first, last, queries + (of.row * heads + head) * most * few.key_stride,
               partials + (index * heads + head) * size);
    // Whoever does the last range of a head joins them all.
    if (left[of.row * heads + head].fetch_sub(1) > 1) return;
    for (int64_t q = 0; q < shape.lengths[of.row] * groups; q++) {
      int64_t query_head = head * groups + q % groups, token = of.row * shape.tokens + q / groups;
      const float* first_partial = partials + (of.index * heads + head) * size + q * few.stride;
      few.merge(first_partial, of.count, heads * size,
                shape.sinks == nullptr ? nullptr : shape.sinks + query_head,
                out + (token * shape.heads + query_head) * shape.value_size);
    }
  });
}

template <class C, class X>
void attend_many(const AttentionShape& shape, const Cache<C>& cache, const Strided<X>& query,
                 X* out) {
  ManyQueries<C> many{shape, cache};
  struct Task {
    int64_t row, head, first, last;
  };
  std::vector<Task> tasks;
  int64_t step = many.tokens_of_task();
  for (int64_t row = 0; row < shape.real_rows; row++)
    for (int64_t first = 0; first < shape.lengths[row]; first += step)
      for (int64_t head = 0; head < shape.kv_heads; head++) {
        int64_t last = first + step < shape.lengths[row] ? first + step : shape.lengths[row];
        tasks.push_back({row, head, first, last});
      }
  int64_t count = int64_t(tasks.size());
  share_out(count, [&](int64_t index) {
    // The last tokens see most: what takes long comes first.
    const Task& task = tasks[count - 1 - index];
    many.attend(query, task.row, task.head, task.first, task.last, out);
  });
}

template <class C, class X>
void attend(const AttentionShape& shape, const Cache<C>& cache, const Strided<X>& query, X* out) {
  if (shape.heads == 0) return;  // the tokens are only stored
  if (shape.has_padding())
    std::memset(static_cast<void*>(out), 0,
                shape.rows * shape.tokens * shape.heads * shape.value_size * sizeof(X));
  if (shape.tokens * shape.groups() <= kFew)
    attend_few(shape, cache, query, out);
  else
    attend_many(shape, cache, query, out);
}

// Calls write(row, head, token) for the real tokens of all rows.
template <class Write>
void for_tokens(const AttentionShape& shape, const Write& write) {
  auto row_head = [&](int64_t index) {
    int64_t row = index / shape.kv_heads, head = index % shape.kv_heads;
    for (int64_t t = 0; t < shape.lengths[row]; t++) write(row, head, t);
  };
  int64_t count = shape.real_rows * shape.kv_heads;
  if (count * shape.tokens * shape.key_size > kSmallWrite)
    share_out(count, row_head);
  else
    for (int64_t index = 0; index < count; index++) row_head(index);
}

template <class C, class X>
void paged_attention(const AttentionShape& shape, const Cache<C>& cache, const Strided<X>& query,
                     const Strided<X>& key, const Strided<X>& value, X* out) {
  for_tokens(shape, [&](int64_t row, int64_t head, int64_t t) {
    int64_t at = cache.place(row, head, shape.start[row] + t);
    convert(cache.keys + at * shape.key_size, key.at(row, head, t), shape.key_size);
    convert(cache.values + at * shape.value_size, value.at(row, head, t), shape.value_size);
  });
  attend(shape, cache, query, out);
}

// Rings: the new tokens take the place of old ones that the first of them may still see, so they
// are written last, and until then stand beside the ring.
template <class C, class X>
void ring_attention(const AttentionShape& shape, const Cache<C>& ring, const Strided<X>& query,
                    const Strided<X>& key, const Strided<X>& value, X* out) {
  int64_t count = shape.real_rows * shape.kv_heads * shape.tokens;
  static thread_local Scratch scratch;
  C* keys = scratch.room<C>(count * (shape.key_size + shape.value_size));
  C* values = keys + count * shape.key_size;
  for_tokens(shape, [&](int64_t row, int64_t head, int64_t t) {
    int64_t at = (row * shape.kv_heads + head) * shape.tokens + t;
    convert(keys + at * shape.key_size, key.at(row, head, t), shape.key_size);
    convert(values + at * shape.value_size, value.at(row, head, t), shape.value_size);
  });
  Cache<C> cache = ring;
  cache.new_keys = keys;
  cache.new_values = values;
  cache.tokens = shape.tokens;
  attend(shape, cache, query, out);
  for_tokens(shape, [&](int64_t row, int64_t head, int64_t t) {
    if (t < shape.lengths[row] - ring.length) return;
    int64_t at = (row * shape.kv_heads + head) * shape.tokens + t;
    int64_t to = ring.place(row, head, shape.start[row] + t);
    convert(ring.keys + to * shape.key_size, keys + at * shape.key_size, shape.key_size);
    convert(ring.values + to * shape.value_size, values + at * shape.value_size,
            shape.value_size);
  });
}

}  // namespace reblock
