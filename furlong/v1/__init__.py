"""Generated from protos/furlong/v1 by `make proto`; never edited by hand."""
