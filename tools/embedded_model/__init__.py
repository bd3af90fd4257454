"""The recipe of the embedded model, selftpt-tiny: docs/embedded-model.md says what it does and why."""
