#include "chain_keys.h"

namespace kvferry {
namespace {

constexpr std::string_view kPrefix("kvferry key 1\0\0\0", 16);

void update(Sha256& hash, std::string_view bytes) { hash.update(bytes.data(), bytes.size()); }

void update_count(Sha256& hash, size_t count) {
  const auto value = static_cast<uint32_t>(count);
  hash.update(&value, sizeof value);
}

}  // namespace

std::string chain_keys(std::string_view name_space, std::string_view parent,
                       std::string_view tokens, size_t chunk_tokens,
                       const std::vector<std::string_view>& extras) {
  const size_t chunk_bytes = chunk_tokens * sizeof(uint32_t);
  std::string keys;
  keys.reserve(extras.size() * sizeof(Digest));
  Digest previous;
  for (size_t i = 0; i < extras.size(); ++i) {
    Sha256 hash;
    update(hash, kPrefix);
    update(hash, name_space);
    update(hash, parent);
    update_count(hash, chunk_tokens);
    update(hash, tokens.substr(i * chunk_bytes, chunk_bytes));
    update_count(hash, extras[i].size());
    update(hash, extras[i]);
    previous = hash.finish();
    parent = {reinterpret_cast<const char*>(previous.data()), previous.size()};
    keys.append(parent);
  }
  return keys;
}

}  // namespace kvferry
