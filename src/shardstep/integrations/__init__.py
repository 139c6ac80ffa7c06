"""Integrations with training frameworks, one file each, which imports its framework. shardstep imports none of them."""
