// A stand-in for torch's header of this name, for programs without torch: the two functions that
// the native operators use, on threads of its own.
#pragma once

#include <cstdint>
#include <thread>
#include <vector>

namespace torch::stable {

inline uint32_t get_num_threads() {
  return 3;
}

// Calls f(first, last) for each index from `begin` to `end`, each on its own thread.
template <class F>
void parallel_for(int64_t begin, int64_t end, int64_t, const F& f) {
  std::vector<std::thread> threads;
  for (int64_t i = begin; i < end; i++) threads.emplace_back([&f, i] { f(i, i + 1); });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace torch::stable
