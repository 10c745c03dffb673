//! Options of the command line.

use std::path::{Path, PathBuf};

use warden_rig::{Context as _, Trouble};

/// All parts, in their order.
pub(crate) const PARTS: [&str; 13] = [
    "start",
    "memory",
    "peak",
    "instructions",
    "calls",
    "reuse",
    "latency",
    "first",
    "rate",
    "paced",
    "spaced",
    "flood",
    "bodies",
];
const GATED: [&str; 4] = ["memory", "instructions", "calls", "reuse"];

#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "switches of a command line")]
pub(crate) struct Options {
    pub(crate) parts: Vec<String>,
    /// Alternating rounds, of which the median counts.
    pub(crate) rounds: usize,
    pub(crate) quick: bool,
    /// True if a missed gate is an error.
    pub(crate) gates: bool,
    /// True to run everything at `SCHED_FIFO`, for a busy machine.
    pub(crate) fifo: bool,
    /// Only these peers, besides direct, nginx and llama-warden.
    pub(crate) peers: Option<Vec<String>>,
    /// Further llama-wardens, each with a name and its differences.
    pub(crate) variants: Vec<Variant>,
    pub(crate) verbose: bool,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Variant {
    pub(crate) name: String,
    pub(crate) binary: Option<PathBuf>,
    pub(crate) sets: Vec<String>,
    pub(crate) viewers: usize,
}

pub(crate) const HELP: &str = "\
cargo bench -p warden-tests --bench peers -- [PART…] [OPTION…]

parts: start memory peak instructions calls reuse latency first rate paced spaced flood bodies (without any: all)
--quick           one shorter round of each, for a rough look
--rounds N        interleaved rounds (5)
--gates           only memory, instructions, calls and reuse; exit code 1 if one of their targets is missed
--fifo            real-time priority for everybody, on a busy machine; needs root
--peers A,B       only these beside direct, nginx and llama-warden: haproxy, llama-swap
--set KEY=VALUE   one more llama-warden, with this setting (again: one more)
--binary PATH     one more llama-warden, of another build; relative to where you are, or to the workspace
--viewers N       one more llama-warden, at whose page so many look meanwhile
--verbose         calls by name";

impl Options {
    pub(crate) fn read(words: impl Iterator<Item = String>) -> Result<Option<Self>, Trouble> {
        let mut options = Self {
            parts: Vec::new(),
            rounds: 5,
            quick: false,
            gates: false,
            fifo: false,
            peers: None,
            variants: Vec::new(),
            verbose: false,
        };
        let mut words = words;
        while let Some(word) = words.next() {
            let mut value = || words.next().context(format!("{word} needs a value"));
            match word.as_str() {
                // cargo adds this flag.
                "--bench" => {}
                "--help" | "-h" => return Ok(None),
                "--quick" => {
                    options.quick = true;
                    options.rounds = 1;
                }
                "--rounds" => options.rounds = value()?.parse()?,
                "--gates" => options.gates = true,
                "--fifo" => options.fifo = true,
                "--verbose" => options.verbose = true,
                "--peers" => options.peers = Some(value()?.split(',').map(str::to_owned).collect()),
                "--set" => {
                    let set = value()?;
                    options.variants.push(Variant {
                        name: set.clone(),
                        sets: vec![set],
                        ..Variant::default()
                    });
                }
                "--binary" => {
                    let name = value()?;
                    let binary = warden_rig::binaries::given(Path::new(&name))?;
                    options.variants.push(Variant { name, binary: Some(binary), ..Variant::default() });
                }
                "--viewers" => {
                    let viewers = value()?.parse()?;
                    let name = format!("{viewers} viewers");
                    options.variants.push(Variant { name, viewers, ..Variant::default() });
                }
                part if PARTS.contains(&part) => options.parts.push(part.to_owned()),
                other => return Err(Trouble::new(format!("no part and no option {other}\n\n{HELP}"))),
            }
        }
        if options.gates {
            options.parts.extend(GATED.map(str::to_owned));
            options.quick = true;
            options.rounds = 1;
        }
        if options.parts.is_empty() {
            options.parts = PARTS.map(str::to_owned).to_vec();
        }
        Ok(Some(options))
    }

    pub(crate) fn wants(&self, part: &str) -> bool {
        self.parts.iter().any(|wanted| wanted == part)
    }

    pub(crate) fn wants_peer(&self, name: &str) -> bool {
        self.peers.as_ref().is_none_or(|peers| peers.iter().any(|peer| peer == name))
    }
}
