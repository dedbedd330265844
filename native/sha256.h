// SHA-256 (FIPS 180-4), with the instructions of x86 where the machine has them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace kvferry {

using Digest = std::array<uint8_t, 32>;
using Sha256State = std::array<uint32_t, 8>;
using Sha256Blocks = void (*)(Sha256State& state, const uint8_t* data, size_t block_count);

void sha256_blocks_portable(Sha256State& state, const uint8_t* data, size_t block_count);
Sha256Blocks sha256_blocks_fastest();

class Sha256 {
 public:
  explicit Sha256(Sha256Blocks blocks = sha256_blocks_fastest()) : blocks_(blocks) {}

  void update(const void* data, size_t length_bytes);
  Digest finish();

 private:
  static constexpr size_t kBlockBytes = 64;

  Sha256Blocks blocks_;
  Sha256State state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                        0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, kBlockBytes> tail_;
  uint64_t total_bytes_ = 0;
};

}  // namespace kvferry
