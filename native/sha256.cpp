#include "sha256.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace kvferry {
namespace {

alignas(16) constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t rotr(uint32_t x, int count) { return (x >> count) | (x << (32 - count)); }

uint32_t load_be32(const uint8_t* data) {
  uint32_t word;
  std::memcpy(&word, data, sizeof word);
  return __builtin_bswap32(word);
}

#if defined(__x86_64__)
// The instructions hold the state as (a b e f) and (c d g h), the first word highest.
__attribute__((target("sha,sse4.1"))) void blocks_x86(Sha256State& state, const uint8_t* data,
                                                      size_t block_count) {
  const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  const auto* round_keys = reinterpret_cast<const __m128i*>(kRound);
  __m128i abef = _mm_set_epi32(state[0], state[1], state[4], state[5]);
  __m128i cdgh = _mm_set_epi32(state[2], state[3], state[6], state[7]);
  for (; block_count > 0; --block_count, data += 64) {
    const __m128i abef_before = abef, cdgh_before = cdgh;
    __m128i w[4];
    for (int i = 0; i < 4; ++i) {
      const auto* words = reinterpret_cast<const __m128i*>(data) + i;
      w[i] = _mm_shuffle_epi8(_mm_loadu_si128(words), swap);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const __m128i keyed = _mm_add_epi32(w[i & 3], round_keys[i]);
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, keyed);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(keyed, 0x0e));
      const __m128i next = w[(i + 1) & 3], later = w[(i + 2) & 3], last = w[(i + 3) & 3];
      const __m128i partial =
          _mm_add_epi32(_mm_sha256msg1_epu32(w[i & 3], next), _mm_alignr_epi8(last, later, 4));
      w[i & 3] = _mm_sha256msg2_epu32(partial, last);
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  alignas(16) uint32_t words[8];
  _mm_store_si128(reinterpret_cast<__m128i*>(words), abef);
  _mm_store_si128(reinterpret_cast<__m128i*>(words) + 1, cdgh);
  state = {words[3], words[2], words[7], words[6], words[1], words[0], words[5], words[4]};
}

bool has_sha_instructions() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_SSE4_1)) return false;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_SHA);
}
#endif

}  // namespace

void sha256_blocks_portable(Sha256State& state, const uint8_t* data, size_t block_count) {
  for (; block_count > 0; --block_count, data += 64) {
    uint32_t w[64];
    for (int i = 0; i < 16; ++i) w[i] = load_be32(data + 4 * i);
    for (int i = 16; i < 64; ++i) {
      const uint32_t x = w[i - 15], y = w[i - 2];
      w[i] = w[i - 16] + (rotr(x, 7) ^ rotr(x, 18) ^ (x >> 3)) + w[i - 7] +
             (rotr(y, 17) ^ rotr(y, 19) ^ (y >> 10));
    }
    auto [a, b, c, d, e, f, g, h] = state;
    for (int i = 0; i < 64; ++i) {
      const uint32_t t1 = h + (rotr(e, 6) ^ rotr(e, 11) ^ rotr(e, 25)) + ((e & f) ^ (~e & g)) +
                          kRound[i] + w[i];
      const uint32_t t2 =
          (rotr(a, 2) ^ rotr(a, 13) ^ rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    const Sha256State sum = {a, b, c, d, e, f, g, h};
    for (int i = 0; i < 8; ++i) state[i] += sum[i];
  }
}

Sha256Blocks sha256_blocks_fastest() {
#if defined(__x86_64__)
  static const bool has_instructions = has_sha_instructions();
  if (has_instructions) return blocks_x86;
#endif
  return sha256_blocks_portable;
}

void Sha256::update(const void* data, size_t length_bytes) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  const size_t held_bytes = total_bytes_ % kBlockBytes;
  total_bytes_ += length_bytes;
  if (held_bytes > 0) {
    const size_t taken_bytes = std::min(kBlockBytes - held_bytes, length_bytes);
    std::memcpy(tail_.data() + held_bytes, bytes, taken_bytes);
    if (held_bytes + taken_bytes < kBlockBytes) return;
    blocks_(state_, tail_.data(), 1);
    bytes += taken_bytes;
    length_bytes -= taken_bytes;
  }
  blocks_(state_, bytes, length_bytes / kBlockBytes);
  const size_t rest_bytes = length_bytes % kBlockBytes;
  std::memcpy(tail_.data(), bytes + length_bytes - rest_bytes, rest_bytes);
}

Digest Sha256::finish() {
  const uint64_t length_bits = __builtin_bswap64(total_bytes_ * 8);
  const std::array<uint8_t, kBlockBytes> padding = {0x80};
  const size_t room_bytes = (119 - total_bytes_ % kBlockBytes) % kBlockBytes + 1;
  update(padding.data(), room_bytes);
  update(&length_bits, sizeof length_bits);
  Digest digest;
  for (int i = 0; i < 8; ++i) {
    const uint32_t word = __builtin_bswap32(state_[i]);
    std::memcpy(digest.data() + 4 * i, &word, sizeof word);
  }
  return digest;
}

}  // namespace kvferry
