// Chunk keys, version 1: docs/formats.md; `keys.chunk_key` is the reference.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "sha256.h"

namespace kvferry {

// 32 bytes for each of `extras`, whose chunk of `chunk_tokens` tokens follows in `tokens`.
std::string chain_keys(std::string_view name_space, std::string_view parent,
                       std::string_view tokens, size_t chunk_tokens,
                       const std::vector<std::string_view>& extras);

}  // namespace kvferry
