#include "slice_header.h"

#include <cstring>

#include "checksum.h"

namespace kvferry {
namespace {

uint64_t checksum_of(SliceHeader header) {
  header.header_checksum = 0;
  return checksum(&header, sizeof header);
}

bool is_hole(const SliceHeader& header) {
  static constexpr SliceHeader kHole = {};
  return std::memcmp(&header, &kHole, sizeof header) == 0;
}

template <class Field>
bool same(const Field& a, const Field& b) {
  return std::memcmp(&a, &b, sizeof a) == 0;
}

}  // namespace

void stamp(SliceHeader& header, const SliceHeader& page, uint32_t slice_index,
           uint64_t payload_checksum) {
  header = page;
  header.slice_index = slice_index;
  header.payload_checksum = payload_checksum;
  header.header_checksum = checksum_of(header);
}

Outcome verify(const SliceHeader& found, const SliceHeader& page, uint32_t slice_index) {
  if (is_hole(found)) return Outcome::kAbsent;
  if (!same(found.magic, page.magic)) return Outcome::kCorrupt;
  if (found.header_checksum != checksum_of(found)) return Outcome::kCorrupt;
  const bool is_wanted =
      found.version == page.version && found.header_bytes == page.header_bytes &&
      same(found.name_space, page.name_space) && same(found.key, page.key) &&
      same(found.generation, page.generation) && found.slice_index == slice_index &&
      found.slice_count == page.slice_count && found.payload_bytes == page.payload_bytes;
  return is_wanted ? Outcome::kOk : Outcome::kForeign;
}

}  // namespace kvferry
