// The slice header, version 1, and what a reader checks: docs/formats.md.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvferry {

inline constexpr size_t kHeaderBytes = 4096;
inline constexpr size_t kHeaderUsedBytes = 256;

struct SliceHeader {
  char magic[8];
  uint32_t version;
  uint32_t header_bytes;
  uint8_t name_space[32];
  uint8_t key[32];
  uint8_t parent[32];
  uint8_t generation[16];
  uint8_t tenant[16];
  uint32_t chunk_index;
  uint32_t group;
  uint32_t slice_index;
  uint32_t slice_count;
  uint64_t payload_bytes;
  uint64_t payload_checksum;
  uint8_t unused[72];
  uint64_t header_checksum;
  uint8_t zeros[kHeaderBytes - kHeaderUsedBytes];
};
static_assert(sizeof(SliceHeader) == kHeaderBytes && offsetof(SliceHeader, header_checksum) == 248);

// In the order of `pages.base.Outcome`.
enum class Outcome { kOk, kAbsent, kForeign, kCorrupt, kShort, kIoError, kNoSpace };

// Writes a header from its template.
void stamp(SliceHeader& header, const SliceHeader& page, uint32_t slice_index,
           uint64_t payload_checksum);

// Is `found` a whole header, and of the slice that was asked for?
Outcome verify(const SliceHeader& found, const SliceHeader& page, uint32_t slice_index);

}  // namespace kvferry
