"""Shipped test support: conformance suites, fault wrappers, clocks that are moved by hand."""
