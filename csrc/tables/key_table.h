// key_table.h: values by keys of 32 bytes: the index of chunks.
//
// An entry is two addresses, of the key's bytes and of the value. Both belong to the caller, and
// stay where they are while the entry is in the table. Keys are chosen by clients: their place
// depends on a secret.
//
// One thread uses it. Memory: 16 bytes a slot, of which 3/5 to 3/4 are used: 21 to 27 bytes an
// entry. Each of 256 parts grows and shrinks alone: no call moves more entries than one part has.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvserver {

class KeyTable {
  public:
    static constexpr size_t kKeyBytes = 32;
    static constexpr size_t kMostAtOnce = 64;

    struct Entry {
        const char* key = nullptr;  // a multiple of 16; nullptr: there is no such entry
        void* value = nullptr;
    };

    explicit KeyTable(uint64_t seed);

    // The values of `count` <= kMostAtOnce keys, which lie end to end; nullptr where a key is
    // absent.
    void find(const char* keys, size_t count, void** values) const;

    // Throws std::invalid_argument if the key is not at a multiple of 16, or is in the table.
    void add(const Entry& entry);
    bool add_absent(const Entry& entry);  // false, and nothing is added, if the key is in the table
    Entry remove(const char* key);
    Entry pop();  // any entry

    size_t size() const { return size_; }

    // Calls visit(Entry) for each entry until it returns false.
    template <typename Visit>
    void each(Visit visit) const {
        for (const Part& part : parts_) {
            for (const Line& line : part.lines) {
                for (const Slot& slot : line) {
                    if (slot.key != 0 && !visit(slot.entry())) return;
                }
            }
        }
    }

  private:
    static constexpr size_t kParts = 256;
    static constexpr uintptr_t kTag = 15;

    // The address of a key and, in its low bits, four bits of the key's place: most other keys need
    // not be read. 0: the slot is empty.
    struct Slot {
        uintptr_t key = 0;
        void* value = nullptr;

        Entry entry() const { return {reinterpret_cast<const char*>(key & ~kTag), value}; }
    };
    // The unit that memory is read by. A key is searched for from the first slot of a line on.
    static constexpr size_t kLineSlots = 4;
    struct alignas(kLineSlots * sizeof(Slot)) Line : std::array<Slot, kLineSlots> {};
    // A table of its own, with linear probing. It has no lines while it is empty.
    struct Part {
        std::vector<Line> lines;
        size_t used = 0;

        size_t size() const { return lines.size() * kLineSlots; }
        size_t home(uint64_t place) const {
            return ((place & 0xffffffff) * lines.size() >> 32) * kLineSlots;
        }
        size_t next(size_t at) const { return at + 1 < size() ? at + 1 : 0; }
        Slot& slot(size_t at) { return lines[at / kLineSlots][at % kLineSlots]; }
        const Slot& slot(size_t at) const { return lines[at / kLineSlots][at % kLineSlots]; }
    };

    uint64_t place(const char* key) const;
    static uintptr_t tag(uint64_t place) { return place >> 32 & kTag; }
    static size_t part_of(uint64_t place) { return place >> 56; }
    static size_t find(const Part& part, const char* key, uint64_t place);
    void rebuild(Part& part, size_t lines);
    Entry erase(Part& part, size_t at);

    const uint64_t seed_;
    const uint64_t factor_;
    std::vector<Part> parts_;  // kParts; none before the first entry
    size_t size_ = 0;
    size_t popped_ = 0;  // the part from which pop() took the last entry
    size_t popped_at_ = 0;
};

}  // namespace kvserver
