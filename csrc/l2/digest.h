// digest.h: XXH3-128 of bytes that arrive in pieces. It finds accidents; it stops no attacker.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

namespace kvserver {

using DigestBytes = std::array<std::byte, 16>;  // XXH3-128 in its canonical form

class Digest {
  public:
    Digest();
    ~Digest();
    Digest(const Digest&) = delete;
    Digest& operator=(const Digest&) = delete;
    void update(const void* data, size_t bytes);
    DigestBytes value() const;

  private:
    struct State;
    std::unique_ptr<State> state_;
};

uint64_t checksum(std::string_view data);                       // XXH3-64
uint64_t checksum(const std::vector<std::string_view>& parts);  // of all, end to end

}  // namespace kvserver
