"""The version of dapo."""

VERSION = "0.1.0"
