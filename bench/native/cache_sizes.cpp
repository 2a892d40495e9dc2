// cache_sizes.cpp: caches of several sizes that serve the same prompts, one after the other: the
// exact reference of bench/what_if.py, which compiles it. Chunks have numbers; the object of full
// attention of each has some pages. Of a hybrid model chunks at boundaries have a window's and a
// state's object, too. LRU, or a protected segment as kvserver/cache/eviction/slru.py has it, with
// the memory of evictions of kvserver/cache/misses.py, which here loses none.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace {

// Rings through the objects: the first `ends` places are the rings' ends, object i is place ends +
// i.
struct Rings {
    std::vector<uint32_t> older, younger;
    Rings(uint32_t ends, size_t objects) : older(ends + objects), younger(ends + objects) {
        for (uint32_t end = 0; end < ends; ++end) older[end] = younger[end] = end;
    }
    void unlink(uint32_t at) {
        younger[older[at]] = younger[at];
        older[younger[at]] = older[at];
    }
    void link(uint32_t at, uint32_t end) {  // as the youngest
        older[at] = older[end];
        younger[at] = end;
        younger[older[end]] = at;
        older[end] = at;
    }
};

// A chunk has a bit for each object. The state's is needed of the last chunk before a hit's
// boundary, the window's of the last `window` ones.
constexpr uint8_t kFull = 1, kWindow = 2, kState = 4;

struct Hybrid {
    uint32_t window = 0;  // none: it is no hybrid
    uint32_t window_pages = 0, state_pages = 0;
};

struct Cache {
    uint64_t pages, used = 0;
    std::vector<uint8_t> in;  // a bit for each object
    const uint32_t* sizes;
    Hybrid hybrid;
    std::vector<uint8_t> wanted;  // of the prompt
    Cache(uint64_t most, size_t objects, const uint32_t* of, const Hybrid& rules)
        : pages(most), in(objects), sizes(of), hybrid(rules) {}
    virtual ~Cache() = default;

    uint64_t pages_of(uint32_t object, uint8_t bits) const {
        return (bits & kFull ? sizes[object] : 0) + (bits & kWindow ? hybrid.window_pages : 0) +
               (bits & kState ? hybrid.state_pages : 0);
    }
    void want(size_t boundary) {
        if (boundary == 0 || hybrid.window == 0) return;
        wanted[boundary - 1] |= kState;
        for (size_t i = std::max<size_t>(boundary, hybrid.window) - hybrid.window; i < boundary;
             ++i) {
            wanted[i] |= kWindow;
        }
    }
    bool allows(const uint32_t* prompt, size_t boundary) const {
        if (boundary == 0 || hybrid.window == 0) return true;
        if ((in[prompt[boundary - 1]] & kState) == 0) return false;
        size_t i = std::max<size_t>(boundary, hybrid.window) - hybrid.window;
        while (i < boundary && (in[prompt[i]] & kWindow) != 0) ++i;
        return i == boundary;
    }
    // The hit's boundary; then it has all that fits, the first chunk used last. Of a hybrid it
    // stores the boundaries at every `interval` chunks, where what it has of full attention ended,
    // and at the prompt's end, as adapters/common/boundaries.py.
    size_t serve(const uint32_t* prompt, size_t length, size_t interval) {
        size_t full = 0;
        while (full < length && (in[prompt[full]] & kFull) != 0) ++full;
        size_t hit = full;
        while (!allows(prompt, hit)) --hit;
        wanted.assign(length, kFull);
        for (size_t at = interval; at <= length; at += interval) want(at);
        if (full > hit) want(full);
        want(length);
        use(prompt, length, hit);
        return hit;
    }
    // Of chunk i of the prompt the objects that are not there, and how many pages they need.
    uint64_t missing(const uint32_t* prompt, size_t i, size_t hit) {
        wanted[i] &= i < hit && in[prompt[i]] != 0 ? 0 : ~in[prompt[i]];
        return pages_of(prompt[i], wanted[i]);
    }
    // `wanted` becomes what it has stored.
    virtual void use(const uint32_t* prompt, size_t length, size_t hit) = 0;
};

struct Lru : Cache {
    Rings rings;
    Lru(uint64_t most, size_t objects, const uint32_t* of, const Hybrid& rules)
        : Cache(most, objects, of, rules), rings(1, objects) {}

    void use(const uint32_t* prompt, size_t length, size_t hit) override {
        for (size_t i = length; i-- > 0;) {
            const uint32_t object = prompt[i];
            if (in[object] != 0) rings.unlink(object + 1);
            used += missing(prompt, i, hit);
            in[object] |= wanted[i];
            rings.link(object + 1, 0);
            while (used > pages) {
                const uint32_t oldest = rings.younger[0];
                rings.unlink(oldest);
                used -= pages_of(oldest - 1, in[oldest - 1]);
                in[oldest - 1] = 0;
            }
        }
    }
};

struct Slru : Cache {
    static constexpr uint32_t kProbation = 0, kProtected = 1, kEnds = 2, kLeast = 32768;
    Rings rings;
    std::vector<bool> keeps;        // its segment is the protected one
    std::vector<uint32_t> evicted;  // in this generation of evictions; 0: never
    uint32_t generation = 2;
    uint64_t counts[2] = {}, room = kLeast;
    Slru(uint64_t most, size_t objects, const uint32_t* of, const Hybrid& rules)
        : Cache(most, objects, of, rules),
          rings(kEnds, objects),
          keeps(objects),
          evicted(objects) {}

    void unlink(uint32_t object) {
        rings.unlink(object + kEnds);
        --counts[keeps[object] ? 1 : 0];
    }
    void link(uint32_t object, bool keep) {
        keeps[object] = keep;
        rings.link(object + kEnds, keep ? kProtected : kProbation);
        ++counts[keep ? 1 : 0];
    }
    bool evict() {
        for (int i = 0; i < 2 && 5 * counts[1] >= 2 * (counts[0] + counts[1]) + 5; ++i) {
            const uint32_t oldest = rings.younger[kProtected] - kEnds;
            unlink(oldest);
            link(oldest, false);
        }
        uint32_t oldest = rings.younger[kProbation];
        if (oldest == kProbation) oldest = rings.younger[kProtected];
        if (oldest < kEnds) return false;
        oldest -= kEnds;
        unlink(oldest);
        used -= pages_of(oldest, in[oldest]);
        in[oldest] = 0;
        if (room == 0) {
            ++generation;
            room = std::max<uint64_t>(kLeast, counts[0] + counts[1]);
        }
        --room;
        evicted[oldest] = generation;
        return true;
    }
    void use(const uint32_t* prompt, size_t length, size_t hit) override {
        for (size_t i = 0; i < length; ++i) {
            if (in[prompt[i]]) unlink(prompt[i]);  // none of the prompt is evicted for it
        }
        bool returning = true;
        size_t end = hit;
        for (; end < length; ++end) {
            const uint32_t object = prompt[end];
            const uint64_t more = missing(prompt, end, hit);
            while (used + more > pages) {
                if (!evict()) break;
            }
            if (used + more > pages) break;
            if (in[object] == 0) {
                returning = returning && evicted[object] + 1 >= generation;
                keeps[object] = returning;
            }
            in[object] |= wanted[end];
            used += more;
        }
        std::fill_n(wanted.begin(), hit, 0);
        std::fill(wanted.begin() + static_cast<std::ptrdiff_t>(end), wanted.end(), 0);
        for (size_t i = length; i-- > hit;) {
            if (in[prompt[i]]) link(prompt[i], keeps[prompt[i]]);
        }
        for (size_t i = hit; i-- > 0;) link(prompt[i], true);
    }
};

using Sizes = std::vector<std::unique_ptr<Cache>>;

}  // namespace

// `pages`: of each object of full attention; they are read as long as the caches are used.
extern "C" void* make_caches(const uint64_t* sizes, size_t count, const uint32_t* pages,
                             size_t objects, bool protects, uint32_t window, uint32_t window_pages,
                             uint32_t state_pages) {
    auto* made = new Sizes;
    const Hybrid hybrid{window, window_pages, state_pages};
    for (size_t i = 0; i < count; ++i) {
        if (protects) {
            made->push_back(std::make_unique<Slru>(sizes[i], objects, pages, hybrid));
        } else {
            made->push_back(std::make_unique<Lru>(sizes[i], objects, pages, hybrid));
        }
    }
    return made;
}

// The hit's boundary in each cache, which then uses the whole prompt. `stored`: bits of the objects
// of each chunk that cache `l1` stored. `interval` is greater than 0.
extern "C" void serve(void* of, const uint32_t* prompt, size_t length, size_t interval,
                      uint64_t* hits, size_t l1, uint8_t* stored) {
    auto& caches = *static_cast<Sizes*>(of);
    for (size_t i = 0; i < caches.size(); ++i) {
        hits[i] = caches[i]->serve(prompt, length, interval);
    }
    std::copy_n(caches[l1]->wanted.begin(), length, stored);
}

// Chunks in the largest cache.
extern "C" size_t resident(void* of) {
    const std::vector<uint8_t>& in = static_cast<Sizes*>(of)->back()->in;
    return in.size() - static_cast<size_t>(std::count(in.begin(), in.end(), 0));
}

extern "C" void free_caches(void* of) { delete static_cast<Sizes*>(of); }
