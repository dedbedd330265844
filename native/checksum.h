// Checksum, version 1: docs/formats.md. Fixed: a change is a new format version.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvferry {

inline constexpr size_t kLaneBytes = 4096;

// `length_bytes` is a multiple of 4096; `data` is 8-byte aligned.
uint64_t checksum(const void* data, size_t length_bytes);

}  // namespace kvferry
