#include "checksum.h"

// One build for each vector width, chosen when the library is loaded.
#if defined(KVFERRY_HAS_TARGET_CLONES)
#define KVFERRY_CLONES __attribute__((target_clones("default", "avx2", "arch=x86-64-v4")))
#else
#define KVFERRY_CLONES
#endif

namespace kvferry {
namespace {

constexpr uint64_t kP1 = 0x9E3779B185EBCA87;
constexpr uint64_t kP2 = 0xC2B2AE3D27D4EB4F;
constexpr uint64_t kG = 0x9E3779B97F4A7C15;
constexpr size_t kRows = 8;
constexpr size_t kColumns = 64;
constexpr size_t kLineWords = 8;
constexpr size_t kLaneWords = kRows * kColumns;

inline uint64_t mix(uint64_t x) {
  x ^= x >> 32;
  x *= kP2;
  return x ^ (x >> 29);
}

// Row by row, in the order of memory, and one lane ahead: the columns' state stays in the cache.
KVFERRY_CLONES
uint64_t sum_lanes(const uint64_t* words, size_t first_lane, size_t lane_count) {
  uint64_t total = 0;
  for (size_t lane = first_lane; lane < first_lane + lane_count; ++lane) {
    uint64_t h[kColumns];
    for (size_t c = 0; c < kColumns; ++c) h[c] = (c + 1) * kG;
    for (size_t row = 0; row < kRows; ++row, words += kColumns) {
      for (size_t c = 0; c < kColumns; c += kLineWords) __builtin_prefetch(words + kLaneWords + c);
      for (size_t c = 0; c < kColumns; ++c) {
        const uint64_t x = (h[c] ^ words[c]) * kP1;
        h[c] = (x << 31) | (x >> 33);
      }
    }
    uint64_t sum = 0;
    for (size_t c = 0; c < kColumns; ++c) sum += mix(h[c]);
    total += mix(sum + (lane + 1) * kG);
  }
  return total;
}

}  // namespace

void RunningChecksum::add(const void* data, size_t length_bytes) {
  const size_t lane_count = length_bytes / kLaneBytes;
  total_ += sum_lanes(static_cast<const uint64_t*>(data), lane_count_, lane_count);
  lane_count_ += lane_count;
}

uint64_t RunningChecksum::value() const { return mix(total_ ^ lane_count_ * kLaneBytes); }

uint64_t checksum(const void* data, size_t length_bytes) {
  RunningChecksum running;
  running.add(data, length_bytes);
  return running.value();
}

}  // namespace kvferry
