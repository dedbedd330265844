#include "block_map.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

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

void prefetch(const uint8_t* data, size_t length_bytes) {
  for (size_t i = 0; i < length_bytes; i += 64) __builtin_prefetch(data + i);
}

constexpr size_t kLineBytes = 64;

// Past the cache, where whole lines are written: what is copied is not looked at soon, and lines
// that are to be overwritten need not be fetched. `finish_copies` before others read it.
void copy_run(uint8_t* to, const uint8_t* from, size_t length_bytes) {
#if defined(__SSE2__)
  if ((reinterpret_cast<uintptr_t>(to) | length_bytes) % kLineBytes == 0) {
    for (size_t i = 0; i < length_bytes; i += kLineBytes) {
      for (size_t j = i; j < i + kLineBytes; j += sizeof(__m128i)) {
        const __m128i word = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + j));
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + j), word);
      }
    }
    return;
  }
#endif
  std::memcpy(to, from, length_bytes);
}

void finish_copies() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
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

template <bool kIsGather>
void BlockMap::copy(const std::vector<int64_t>& blocks, uint64_t address) const {
  auto* page = reinterpret_cast<uint8_t*>(address) + header_bytes_;
  for (const Layer& layer : layers_) {
    for (const int64_t block : blocks) {
      if (block >= 0) {
        auto* engine = reinterpret_cast<uint8_t*>(layer.base_address) +
                       block * layer.kernel_blocks * layer.block_stride_bytes;
        copy_block<kIsGather>(layer, engine, page);
      }
      page += layer.block_head_bytes();
    }
  }
  finish_copies();
}

// Engine memory is walked in its own order, by token where tokens are outside of heads; a page by
// head then. What is read next is fetched ahead where its stride may be long.
template <bool kIsGather>
void BlockMap::copy_block(const Layer& layer, uint8_t* engine_block, uint8_t* page_block) const {
  const size_t run_bytes = layer.content_bytes;
  for (size_t k = 0; k < layer.kernel_blocks; ++k) {
    for (size_t token = 0; token < layer.block_tokens; ++token) {
      uint8_t* engine = engine_block + token * layer.token_stride_bytes;
      uint8_t* page = page_block + token * run_bytes;
      for (size_t head = 0; head < head_count_; ++head) {
        if (layer.block_tokens > 1) {
          prefetch(kIsGather ? engine + layer.token_stride_bytes : page + run_bytes, run_bytes);
        }
        copy_run(kIsGather ? page : engine, kIsGather ? engine : page, run_bytes);
        engine += layer.head_stride_bytes;
        page += slice_bytes_;
      }
    }
    engine_block += layer.block_stride_bytes;
    page_block += layer.block_tokens * run_bytes;
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
