// bindings_what_if.cpp: the part of kvserver._native that knows what other sizes of L1 would have.
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <tuple>
#include <vector>

#include "python/bindings.h"
#include "tables/what_if.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace kvserver;

namespace {

// A prompt of so many chunks is done before another thread could have taken the interpreter's lock,
// unless the whole table has to be moved, which takes milliseconds.
constexpr size_t kFew = 1024;

template <typename Work>
auto without_lock(const WhatIf& table, std::string_view keys, Work work) {
    const size_t chunks = keys.size() / WhatIf::kKeyBytes;
    if (chunks <= kFew && table.has_space(chunks)) return work();
    const nb::gil_scoped_release released;
    return work();
}

using Need = std::tuple<uint16_t, uint32_t, uint32_t>;

HitRules to_rules(uint16_t full, uint32_t chunk_tokens, const std::vector<Need>& others,
                  uint32_t interval) {
    HitRules rules{full, chunk_tokens, {}, interval};
    for (const auto& [bit, chunks, local] : others) rules.others.push_back({bit, chunks, local});
    return rules;
}

}  // namespace

void bind_what_if(nb::module_& m) {
    nb::class_<HitRules>(
        m, "HitRules",
        "What a hit needs: the bits of the full groups, and of each other group (bit, chunks, or "
        "tokens of a local attention's chunk).\n\nObjects of the other groups are kept at "
        "multiples of `interval` chunks, too; 0: at none.")
        .def(nb::new_(&to_rules), "full"_a, "chunk_tokens"_a, "others"_a, "interval"_a = 0);
    nb::class_<WhatIf::Hits>(m, "WhatIfHits",
                             "Of one lookup, where the hit of each size would have ended.");
    nb::class_<WhatIf>(m, "WhatIf",
                       "What caches of six sizes, in pages, and of no limit would have; "
                       "`csrc/tables/what_if.h` is the manual.")
        .def(nb::init<uint64_t, const std::array<uint64_t, WhatIf::kUnlimited>&, bool>(),
             "secret"_a, "sizes"_a, "protects"_a)
        .def(
            "lookup",
            [](WhatIf& table, uint64_t salt, const nb::bytes& keys, const HitRules& rules,
               double chunk_tokens) {
                const std::string_view raw = view(keys);
                return without_lock(table, raw, [&] {
                    const WhatIf::Hits hits = table.lookup(salt, raw, rules);
                    table.count(hits, chunk_tokens);
                    return hits;
                });
            },
            "salt"_a, "keys"_a, "rules"_a, "chunk_tokens"_a)
        .def(
            "lookup_tail",
            [](WhatIf& table, uint64_t salt, const nb::bytes& keys, const HitRules& rules,
               double block_tokens, const WhatIf::Hits& behind, size_t found) {
                const WhatIf::Hits hits = table.lookup(salt, view(keys), rules);
                table.count(hits, block_tokens, behind, found);
                return hits;
            },
            "salt"_a, "keys"_a, "rules"_a, "block_tokens"_a, "behind"_a, "found"_a,
            "Counted for the sizes whose hit `behind` ended at chunk `found`.")
        .def(
            "use",
            [](WhatIf& table, uint64_t salt, const nb::bytes& keys, const HitRules& rules,
               const WhatIf::Hits& hits, size_t found, uint32_t pages) {
                const std::string_view raw = view(keys);
                without_lock(table, raw, [&] { table.use(salt, raw, rules, hits, found, pages); });
            },
            "salt"_a, "keys"_a, "rules"_a, "hits"_a, "found"_a, "pages"_a)
        .def(
            "add",
            [](WhatIf& table, uint64_t salt, const nb::bytes& keys, const HitRules& rules,
               uint16_t bit, uint32_t pages) {
                const std::string_view raw = view(keys);
                without_lock(table, raw, [&] { table.add(salt, raw, rules, bit, pages); });
            },
            "salt"_a, "keys"_a, "rules"_a, "bit"_a, "pages"_a)
        .def(
            "remove",
            [](WhatIf& table, uint64_t salt, const nb::bytes& keys, uint16_t bit, uint32_t pages) {
                table.remove(salt, view(keys), bit, pages);
            },
            "salt"_a, "keys"_a, "bit"_a, "pages"_a)
        .def("clear", &WhatIf::clear)
        .def("hit_tokens", &WhatIf::hit_tokens, "Of all lookups, by size. From any thread.")
        .def("__len__", &WhatIf::size)
        .def_prop_ro("sample_rate", &WhatIf::sample_rate)
        .def_prop_ro("memory_bytes", &WhatIf::memory_bytes);
}
