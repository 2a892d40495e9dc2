// cache_sizes.cpp: caches of several sizes that serve the same prompts, one after the other: the
// exact reference of bench/what_if.py, which compiles it. Objects have numbers; each has some
// pages. LRU, or a protected segment as kvserver/cache/eviction/slru.py has it, with the memory of
// evictions of kvserver/cache/misses.py, which here loses none.
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

struct Cache {
    uint64_t pages, used = 0;
    std::vector<bool> in;
    const uint32_t* sizes;
    Cache(uint64_t most, size_t objects, const uint32_t* of)
        : pages(most), in(objects), sizes(of) {}
    virtual ~Cache() = default;

    // The leading objects that it has; then it has all that fit, the first one used last.
    size_t serve(const uint32_t* prompt, size_t length) {
        size_t hit = 0;
        while (hit < length && in[prompt[hit]]) ++hit;
        use(prompt, length, hit);
        return hit;
    }
    virtual void use(const uint32_t* prompt, size_t length, size_t hit) = 0;
};

struct Lru : Cache {
    Rings rings;
    Lru(uint64_t most, size_t objects, const uint32_t* of)
        : Cache(most, objects, of), rings(1, objects) {}

    void use(const uint32_t* prompt, size_t length, size_t) override {
        for (size_t i = length; i-- > 0;) {
            const uint32_t object = prompt[i];
            if (in[object]) {
                rings.unlink(object + 1);
            } else {
                in[object] = true;
                used += sizes[object];
            }
            rings.link(object + 1, 0);
            while (used > pages) {
                const uint32_t oldest = rings.younger[0];
                rings.unlink(oldest);
                in[oldest - 1] = false;
                used -= sizes[oldest - 1];
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
    Slru(uint64_t most, size_t objects, const uint32_t* of)
        : Cache(most, objects, of), rings(kEnds, objects), keeps(objects), evicted(objects) {}

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
        in[oldest] = false;
        used -= sizes[oldest];
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
            if (in[object]) continue;
            while (used + sizes[object] > pages) {
                if (!evict()) break;
            }
            if (used + sizes[object] > pages) break;
            returning = returning && evicted[object] + 1 >= generation;
            in[object] = true;
            keeps[object] = returning;
            used += sizes[object];
        }
        for (size_t i = length; i-- > hit;) {
            if (in[prompt[i]]) link(prompt[i], keeps[prompt[i]]);
        }
        for (size_t i = hit; i-- > 0;) link(prompt[i], true);
    }
};

using Sizes = std::vector<std::unique_ptr<Cache>>;

}  // namespace

// `pages`: of each object; they are read as long as the caches are used.
extern "C" void* make_caches(const uint64_t* sizes, size_t count, const uint32_t* pages,
                             size_t objects, bool protects) {
    auto* made = new Sizes;
    for (size_t i = 0; i < count; ++i) {
        if (protects) {
            made->push_back(std::make_unique<Slru>(sizes[i], objects, pages));
        } else {
            made->push_back(std::make_unique<Lru>(sizes[i], objects, pages));
        }
    }
    return made;
}

// The leading objects that each cache has; then it uses all of them.
extern "C" void serve(void* of, const uint32_t* prompt, size_t length, uint64_t* hits) {
    auto& caches = *static_cast<Sizes*>(of);
    for (size_t i = 0; i < caches.size(); ++i) hits[i] = caches[i]->serve(prompt, length);
}

// Objects in the largest cache.
extern "C" size_t resident(void* of) {
    const std::vector<bool>& in = static_cast<Sizes*>(of)->back()->in;
    return static_cast<size_t>(std::count(in.begin(), in.end(), true));
}

extern "C" void free_caches(void* of) { delete static_cast<Sizes*>(of); }
