// Checksum, version 1: docs/formats.md. Fixed: a change is a new format version.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvferry {

inline constexpr size_t kLaneBytes = 4096;

// `length_bytes` is a multiple of 4096; `data` is 8-byte aligned.
uint64_t checksum(const void* data, size_t length_bytes);

// The same, for content that comes piece by piece, in order.
class RunningChecksum {
 public:
  void add(const void* data, size_t length_bytes);
  uint64_t value() const;

 private:
  uint64_t total_ = 0;
  size_t lane_count_ = 0;
};

}  // namespace kvferry
