// block_runs.cpp: block ids as varints of differences, one by one or in runs.
#include "tables/block_runs.h"

#include <limits>
#include <stdexcept>

namespace kvserver {

namespace {

constexpr char kSingles = 0, kRuns = 1;

uint64_t zigzag(int64_t value) {
    return static_cast<uint64_t>(value) << 1 ^ static_cast<uint64_t>(value >> 63);
}

int64_t unzigzag(uint64_t value) {
    return static_cast<int64_t>(value >> 1) ^ -static_cast<int64_t>(value & 1);
}

void put(std::string& out, uint64_t value) {
    for (; value >= 0x80; value >>= 7) out.push_back(static_cast<char>(value | 0x80));
    out.push_back(static_cast<char>(value));
}

// One past the last id of the run that begins at `first`; `step` becomes its direction.
size_t end_of_run(const std::vector<uint32_t>& ids, size_t first, int64_t& step) {
    step = 1;
    size_t end = first + 1;
    if (end < ids.size() && int64_t{ids[end]} == int64_t{ids[first]} - 1) step = -1;
    while (end < ids.size() && int64_t{ids[end]} == int64_t{ids[end - 1]} + step) ++end;
    return end;
}

struct Reader {
    std::string_view packed;
    size_t at = 0;

    [[noreturn]] void refuse(const char* what) const {
        throw std::invalid_argument("byte " + std::to_string(at) + ": " + what);
    }

    bool at_end() const { return at == packed.size(); }

    // Below 2^35; a number has one spelling only.
    uint64_t number() {
        uint64_t value = 0;
        for (int shift = 0; shift < 35; shift += 7) {
            if (at_end()) refuse("a number is cut off");
            const auto byte = static_cast<uint8_t>(packed[at++]);
            value |= uint64_t{byte & 0x7fu} << shift;
            if (byte < 0x80) {
                if (byte == 0 && shift > 0) refuse("a number is longer than it need be");
                return value;
            }
        }
        refuse("a number is too large");
    }

    uint32_t id(int64_t value) const {
        if (value < 0 || value > std::numeric_limits<uint32_t>::max())
            refuse("an id is not of 32 bits");
        return static_cast<uint32_t>(value);
    }
};

}  // namespace

std::string pack_blocks(const std::vector<uint32_t>& ids) {
    if (ids.empty()) return {};
    std::string singles(1, kSingles), runs(1, kRuns);
    int64_t before = 0;
    for (const uint32_t id : ids) {
        put(singles, zigzag(id - before));
        before = id;
    }
    before = 0;
    for (size_t first = 0, end = 0; first < ids.size() && runs.size() < singles.size();
         first = end) {
        int64_t step = 1;
        end = end_of_run(ids, first, step);
        put(runs, zigzag(ids[first] - before));
        put(runs, uint64_t{end - first} << 1 | (step < 0));
        before = ids[end - 1];
    }
    return runs.size() < singles.size() ? runs : singles;
}

std::vector<uint32_t> unpack_blocks(std::string_view packed, size_t most) {
    std::vector<uint32_t> ids;
    if (packed.empty()) return ids;
    Reader reader{packed};
    const uint64_t form = reader.number();
    if (form != kSingles && form != kRuns) reader.refuse("neither ids nor runs of ids");
    int64_t before = 0;
    while (!reader.at_end()) {
        const int64_t first = before + unzigzag(reader.number());
        const uint64_t run = form == kRuns ? reader.number() : 1u << 1;
        const uint64_t length = run >> 1;
        const int64_t step = run & 1 ? -1 : 1;
        if (length == 0) reader.refuse("a run of no ids");
        if (length > most - ids.size())
            reader.refuse(("more than " + std::to_string(most) + " ids").c_str());
        reader.id(first);
        before = reader.id(first + step * static_cast<int64_t>(length - 1));
        for (uint64_t i = 0; i < length; ++i)
            ids.push_back(static_cast<uint32_t>(first + step * static_cast<int64_t>(i)));
    }
    return ids;
}

}  // namespace kvserver
