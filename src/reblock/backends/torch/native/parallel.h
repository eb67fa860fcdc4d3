// Work shared out over torch's threads, in pieces that are taken as threads get free.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace reblock {

inline int64_t num_threads() {
  return torch::stable::get_num_threads();
}

// Calls work(i) for every i below `count`, in no order, on all of torch's threads.
//
// torch's own threads, and none of ours: two sets of threads would wait for each other's cores.
template <class Work>
void share_out(int64_t count, const Work& work) {
  if (count <= 1) {
    if (count == 1) work(0);
    return;
  }
  std::atomic<int64_t> next{0};
  int64_t helpers = num_threads() < count ? num_threads() : count;
  torch::stable::parallel_for(0, helpers, 1, [&](int64_t first, int64_t last) {
    for (int64_t helper = first; helper < last; helper++)
      for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) work(i);
  });
}

// Memory for a moment, that the same thread is given again the next time.
class Scratch {
 public:
  ~Scratch() { std::free(memory_); }

  // At least `count` elements with any content, valid until the next call of it.
  template <class T = float>
  T* room(int64_t count) {
    int64_t bytes = (count * int64_t(sizeof(T)) + 63) / 64 * 64;
    if (bytes > size_) {
      std::free(memory_);
      size_ = 0;
      memory_ = std::aligned_alloc(64, bytes);
      if (memory_ == nullptr) throw std::bad_alloc();
      size_ = bytes;
    }
    return static_cast<T*>(memory_);
  }

 private:
  void* memory_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace reblock
