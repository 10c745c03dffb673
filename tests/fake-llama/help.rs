//! Text of `--help`. With `FAKE_LLAMA_HELP=old` it lists flags as llama-server before about b10884, with
//! `new` as later ones; each refuses the other's flags. Without the variable it lists only the flags that
//! fake-llama needs.

/// Flags in both lists; only those in [`crate::args`] have an effect.
const BOTH: &str = "\
-m,    --model FNAME                    model path to load
-a,    --alias STRING                   set model name aliases, comma-separated
--host HOST                             ip address to listen, or bind to an UNIX socket if the address ends with .sock
--port PORT                             port to listen
-c,    --ctx-size N                     size of the prompt context (default: 0, 0 = loaded from model)
-np,   --parallel N                     number of server slots (default: -1, -1 = auto)
-b,    --batch-size N                   logical maximum batch size
-ub,   --ubatch-size N                  physical maximum batch size
-t,    --threads N                      number of CPU threads to use during generation
-ngl,  --gpu-layers, --n-gpu-layers N   max. number of layers to store in VRAM
-sm,   --split-mode {none,layer,row,tensor}
                                        how to split the model across multiple GPUs
-fa,   --flash-attn [on|off|auto]       set Flash Attention use ('on', 'off', or 'auto', default: 'auto')
-cram, --cache-ram N                    set the maximum cache size in MiB
--warmup, --no-warmup                   whether to perform warmup with an empty run (default: enabled)
--repack, -nr, --no-repack              whether to enable weight repacking (default: enabled)
-ctk,  --cache-type-k TYPE              KV cache data type for K
-ctv,  --cache-type-v TYPE              KV cache data type for V
-mm,   --mmproj FILE                    path to a multimodal projector file
--api-key KEY                           API key to use for authentication
--metrics                               enable prometheus compatible metrics endpoint
--slot-save-path PATH                   path to save slot kv cache (default: disabled)
--embeddings                            restrict to only support embedding use case
";

const OLD: &str = "\
--mlock                                 force system to keep model in RAM rather than swapping or compressing
--mmap, --no-mmap                       whether to memory-map model (default: enabled)
-dio,  --direct-io, -ndio, --no-direct-io
                                        use DirectIO if available
";

const NEW: &str = "\
-lm,   --load-mode MODE                 model loading mode (default: auto)
                                        - none: no special loading mode
                                        - mmap: memory-map model
                                        - mlock: force system to keep model in RAM
";

const OF_OLD: [&str; 7] =
    ["--mlock", "--mmap", "--no-mmap", "-dio", "--direct-io", "-ndio", "--no-direct-io"];
const OF_NEW: [&str; 2] = ["-lm", "--load-mode"];

fn time() -> Option<String> {
    std::env::var("FAKE_LLAMA_HELP").ok()
}

pub(crate) fn text() -> String {
    let usage = "----- common params -----\n\n-h,    --help, --usage                  print usage and exit\n";
    match time().as_deref() {
        Some("old") => format!("{usage}{BOTH}{OLD}"),
        Some("new") => format!("{usage}{BOTH}{NEW}"),
        _ => format!(
            "{usage}--slot-save-path PATH                   path to save slot kv cache (default: disabled)\n"
        ),
    }
}

/// Returns true for a flag of the other list.
pub(crate) fn refuses(flag: &str) -> bool {
    match time().as_deref() {
        Some("old") => OF_NEW.contains(&flag),
        Some("new") => OF_OLD.contains(&flag),
        _ => false,
    }
}
