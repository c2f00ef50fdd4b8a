"""Plays the cases of `clients/conformance/cases.json` with every client, and judges what they report."""
