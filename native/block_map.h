// Copies blocks of engine memory to and from the slices of an extent, in canonical order:
// head, layer, block, kernel block, token, content (layout.py).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvferry {

// One layer's KV cache: `layout.Region`.
struct Layer {
  uint64_t base_address;
  size_t kernel_blocks;
  size_t block_tokens;
  size_t content_bytes;
  size_t block_stride_bytes;
  size_t head_stride_bytes;
  size_t token_stride_bytes;

  size_t block_head_bytes() const { return kernel_blocks * block_tokens * content_bytes; }
};

class BlockMap {
 public:
  // Throws std::invalid_argument for sizes that cannot be.
  BlockMap(std::vector<Layer> layers, size_t head_count, size_t header_bytes, size_t slice_bytes);

  // Throws std::invalid_argument if so many blocks do not fit a slice.
  void check_fits(size_t block_count) const;

  // `address`: the extent's first header. Headers are left alone; payloads get zeros to their end.
  void gather(const std::vector<int64_t>& blocks, uint64_t address) const;

  // A negative block is skipped.
  void scatter(const std::vector<int64_t>& blocks, uint64_t address) const;

 private:
  template <bool kIsGather>
  void copy(const std::vector<int64_t>& blocks, uint64_t address) const;
  template <bool kIsGather>
  void copy_block(const Layer& layer, uint8_t* engine_block, uint8_t* page_block) const;

  std::vector<Layer> layers_;  // with runs as long as their strides allow
  size_t head_count_;
  size_t header_bytes_;
  size_t slice_bytes_;
  size_t block_bytes_ = 0;  // one block of one head in all layers
};

}  // namespace kvferry
