#!/bin/sh
exec build/go/conformance
