# What makes a build depend on its sources and its compiler alone (docs/releasing.md). To be sourced.

reproducibly() { # reproducibly TREE CARGO_HOME TARGET: exports what cargo is to be told where those lie there
    export CARGO_INCREMENTAL=0
    export RUSTFLAGS="${RUSTFLAGS:-} --remap-path-prefix=$1=llama-warden --remap-path-prefix=$2=cargo --remap-path-prefix=$3=target"
    export CFLAGS="${CFLAGS:-} -ffile-prefix-map=$2=cargo -ffile-prefix-map=$3=target"
}

for_load() { # for_load FILE: exports what cargo is to be told to optimise for a profile of packaging/profile.sh
    # What never runs under load lies apart in the program's file, so that fewer of its pages are in memory.
    export RUSTFLAGS="${RUSTFLAGS:-} -Cprofile-use=$1 -Clink-arg=-Wl,-z,keep-text-section-prefix"
}
