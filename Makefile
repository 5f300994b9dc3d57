# make demo   both demos        make test   the test suite        make check   linter and type checkers
# Each target makes its own virtual environment first and installs what it needs; a second run does not.

VENV := .venv

.PHONY: demo test check clean
.DEFAULT_GOAL := test

demo: $(VENV)/.installed
	$(VENV)/bin/python outbox/main.py
	$(VENV)/bin/python circuit_breaker/main.py

test: $(VENV)/.installed
	$(VENV)/bin/python -m pytest

check: $(VENV)/.check-installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/pyright

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Tries each interpreter by running it: a name on the PATH may be a shim of a version that is not there.
$(VENV)/.installed: requirements.txt
	@python=; \
	for candidate in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11 python; do \
		if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$candidate; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
		echo "make: Python 3.11 or newer is needed and none was found (say where it is: make PYTHON=/path/to/python3)" >&2; exit 1; \
	fi; \
	if ! $$python -c 'import venv, ensurepip' 2>/dev/null; then \
		echo "make: $$python has no venv module (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; \
	fi; \
	echo "Installing into $(VENV) with $$($$python --version) ..."; \
	$$python -m venv --clear $(VENV) || { echo "make: could not create the virtual environment $(VENV)" >&2; exit 1; }; \
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt || \
		{ echo "make: could not install requirements.txt (no network, or no package index?)" >&2; exit 1; }
	@touch $@

$(VENV)/.check-installed: requirements-check.txt $(VENV)/.installed
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-check.txt || \
		{ echo "make: could not install requirements-check.txt (no network, or no package index?)" >&2; exit 1; }
	@touch $@
