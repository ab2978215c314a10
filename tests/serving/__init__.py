"""Tests of acm_compiler/serving."""
