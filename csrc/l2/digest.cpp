// digest.cpp: see digest.h. The only file that compiles xxhash.
#include "l2/digest.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstring>

namespace kvserver {

struct Digest::State {
    XXH3_state_t xxh3;
};

Digest::Digest() : state_(new State) { XXH3_128bits_reset(&state_->xxh3); }

Digest::~Digest() = default;

void Digest::update(const void* data, size_t bytes) {
    XXH3_128bits_update(&state_->xxh3, data, bytes);
}

DigestBytes Digest::value() const {
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(&state_->xxh3));
    DigestBytes value;
    static_assert(sizeof(canonical) == sizeof(value));
    std::memcpy(value.data(), &canonical, sizeof(value));
    return value;
}

uint64_t checksum(std::string_view data) { return XXH3_64bits(data.data(), data.size()); }

uint64_t checksum(const std::vector<std::string_view>& parts) {
    XXH3_state_t state;
    XXH3_64bits_reset(&state);
    for (std::string_view part : parts) XXH3_64bits_update(&state, part.data(), part.size());
    return XXH3_64bits_digest(&state);
}

}  // namespace kvserver
