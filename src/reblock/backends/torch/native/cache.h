// What attention reads and writes: queries, new keys and values, and the cache of one layer.
//
// B rows, T tokens a row, H query heads, K key-value heads, G = H / K, D key size, E value size.
// A row's tokens stand at positions start, start + 1, ...; a token sees the positions up to its
// own, and with a window no more than that many of them.
#pragma once

#include "vector.h"

namespace reblock {

constexpr float kLowest = -1e30f;  // in place of minus infinity, whose differences are no numbers

template <class T>
struct Strided {  // [B, heads, T, size], the last dimension contiguous
  const T* data;
  int64_t row, head, token;
  const T* at(int64_t b, int64_t h, int64_t t) const {
    return data + b * row + h * head + t * token;
  }
};

template <class C>
struct Run {  // keys and values that lie one behind the other
  const C* keys;
  const C* values;
  int64_t length;
};

// Where the cache of one layer holds what.
template <class C>
struct Cache {
  C* keys;    // paged [blocks, K, length, D], rings [max batch, K, length, D]
  C* values;  // the same with E
  int64_t kv_heads, length, key_size, value_size;
  bool is_ring;
  const int64_t* where;  // block tables [B, width], or slots [B]
  int64_t width;
  // The new tokens of rings, [B, K, T, D]: in the ring they would take the place of some that the
  // first of them still see. Null where they are in the cache already.
  const C* new_keys;
  const C* new_values;
  int64_t tokens;

  int64_t place(int64_t row, int64_t head, int64_t position) const {
    int64_t index = is_ring ? where[row] : where[row * width + position / length];
    return (index * kv_heads + head) * length + position % length;
  }

  // The longest run from `position` on that ends at `end` or before.
  Run<C> run(int64_t row, int64_t head, int64_t start, int64_t position, int64_t end) const {
    if (new_keys != nullptr && position >= start) {
      int64_t at = (row * kv_heads + head) * tokens + position - start;
      return {new_keys + at * key_size, new_values + at * value_size, end - position};
    }
    if (new_keys != nullptr && end > start) end = start;
    int64_t at = place(row, head, position), left = length - position % length;
    return {keys + at * key_size, values + at * value_size,
            end - position < left ? end - position : left};
  }
};

struct AttentionShape {
  int64_t rows, real_rows, tokens, heads, kv_heads, key_size, value_size;
  float scale, softcap;    // softcap 0: none
  int64_t window;          // 0: none
  const float* sinks;      // [H], or null
  const int64_t* start;    // [B]
  const int64_t* lengths;  // [B] real tokens
  int64_t groups() const { return heads / kv_heads; }
  int64_t padded_key() const { return (key_size + kPanel - 1) / kPanel * kPanel; }
  int64_t padded_value() const { return (value_size + kPanel - 1) / kPanel * kPanel; }
  bool has_padding() const {
    if (real_rows < rows) return true;
    for (int64_t row = 0; row < rows; row++)
      if (lengths[row] < tokens) return true;
    return false;
  }
  // The first position that a token at `position` sees.
  int64_t first_seen(int64_t position) const {
    return window > 0 && position >= window ? position - window + 1 : 0;
  }
};

}  // namespace reblock
