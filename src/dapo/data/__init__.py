"""Rows from files and data sets, in order; chat templates; token ids of prompts."""
