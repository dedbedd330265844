#include "block_map.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace kvferry {
namespace {

// Tokens that lie side by side are one run, and so are kernel blocks.
Layer coalesced(Layer layer) {
  if (layer.token_stride_bytes == layer.content_bytes || layer.block_tokens == 1) {
    layer.content_bytes *= layer.block_tokens;
    layer.block_tokens = 1;
    if (layer.block_stride_bytes == layer.content_bytes) {
      layer.content_bytes *= layer.kernel_blocks;
      layer.block_stride_bytes *= layer.kernel_blocks;
      layer.kernel_blocks = 1;
    }
  }
  return layer;
}

// `count` runs; `kBytes`: their size where the compiler shall know it, or 0.
template <bool kIsGather, size_t kBytes>
void copy_runs(uint8_t* engine, size_t stride_bytes, uint8_t* page, size_t count, size_t bytes) {
  const size_t run_bytes = kBytes ? kBytes : bytes;
  for (; count > 0; --count, engine += stride_bytes, page += run_bytes) {
    if (kIsGather) {
      std::memcpy(page, engine, run_bytes);
    } else {
      std::memcpy(engine, page, run_bytes);
    }
  }
}

template <bool kIsGather>
auto copier_of(size_t run_bytes) {
  switch (run_bytes) {
    case 128: return copy_runs<kIsGather, 128>;
    case 256: return copy_runs<kIsGather, 256>;
    case 512: return copy_runs<kIsGather, 512>;
    default: return copy_runs<kIsGather, 0>;
  }
}

}  // namespace

BlockMap::BlockMap(std::vector<Layer> layers, size_t head_count, size_t header_bytes,
                   size_t slice_bytes)
    : layers_(std::move(layers)),
      head_count_(head_count),
      header_bytes_(header_bytes),
      slice_bytes_(slice_bytes) {
  if (header_bytes > slice_bytes) throw std::invalid_argument("header_bytes exceeds slice_bytes");
  for (Layer& layer : layers_) {
    if (layer.block_head_bytes() == 0) throw std::invalid_argument("a layer without content");
    block_bytes_ += layer.block_head_bytes();
    layer = coalesced(layer);
  }
}

void BlockMap::check_fits(size_t block_count) const {
  const size_t room_bytes = slice_bytes_ - header_bytes_;
  if (block_bytes_ > 0 && block_count > room_bytes / block_bytes_) {
    throw std::invalid_argument(std::to_string(block_count) + " blocks of " +
                                std::to_string(block_bytes_) + " bytes exceed a payload of " +
                                std::to_string(room_bytes));
  }
}

// Heads are inside of blocks here, though outside of them in a page: what one block holds is
// near in engine memory, whichever of head and token is outside there.
template <bool kIsGather>
void BlockMap::copy(const std::vector<int64_t>& blocks, uint64_t address) const {
  auto* page_layer = reinterpret_cast<uint8_t*>(address) + header_bytes_;
  for (const Layer& layer : layers_) {
    const auto copy_tokens = copier_of<kIsGather>(layer.content_bytes);
    const size_t kernel_block_bytes = layer.block_tokens * layer.content_bytes;
    for (size_t i = 0; i < blocks.size(); ++i) {
      if (blocks[i] < 0) continue;
      auto* engine_block = reinterpret_cast<uint8_t*>(layer.base_address) +
                           blocks[i] * layer.kernel_blocks * layer.block_stride_bytes;
      uint8_t* page_block = page_layer + i * layer.block_head_bytes();
      for (size_t head = 0; head < head_count_; ++head) {
        uint8_t* engine = engine_block + head * layer.head_stride_bytes;
        uint8_t* page = page_block + head * slice_bytes_;
        for (size_t k = 0; k < layer.kernel_blocks; ++k) {
          copy_tokens(engine, layer.token_stride_bytes, page, layer.block_tokens,
                      layer.content_bytes);
          engine += layer.block_stride_bytes;
          page += kernel_block_bytes;
        }
      }
    }
    page_layer += blocks.size() * layer.block_head_bytes();
  }
}

void BlockMap::gather(const std::vector<int64_t>& blocks, uint64_t address) const {
  copy<true>(blocks, address);
  const size_t filled_bytes = header_bytes_ + blocks.size() * block_bytes_;
  for (size_t head = 0; head < head_count_; ++head) {
    auto* slice = reinterpret_cast<uint8_t*>(address) + head * slice_bytes_;
    std::memset(slice + filled_bytes, 0, slice_bytes_ - filled_bytes);
  }
}

void BlockMap::scatter(const std::vector<int64_t>& blocks, uint64_t address) const {
  copy<false>(blocks, address);
}

}  // namespace kvferry
