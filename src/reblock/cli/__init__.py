"""The command lines `reblock` and `optimum-rbln-cli`: read options, call the library, print."""
