"""Does a part keep the promises of its kind? `conformance("sublayer", "my_layer")` finds out, before a night is spent.

    from gptframe.testing import conformance

    def test_my_layer():
        conformance("sublayer", "my_layer", {"strength": 0.2}).raise_failures()

`gptframe plugins check` runs the same, and `gptframe.testing.pytest_plugin` holds it as a pytest fixture.
docs/plugins.md says what each check asks for and how to read a failure.
"""

from gptframe.testing.kit import CHECKS, Check, Failure, Report, Skip, checks_of, conformance

__all__ = ["CHECKS", "Check", "Failure", "Report", "Skip", "checks_of", "conformance"]
