//! Describes the call sites of a leg in words.

use warden_experiment::GrowthAttribution;
use warden_policies::units::{ByteAmount, as_f64};
use warden_tracer_reader::{AllocationKind, AllocationPlace, TracedMemory};

use super::{HANDLE_KINDS, LegTrace, MemoryAttribution};

/// Blocks smaller than this many sampling intervals are sampled; larger ones are all counted. The tracer uses
/// the same limit.
const SAMPLED_INTERVALS: f64 = 4.0;

fn trace_limits() -> &'static warden_policies::defaults::Trace {
    &warden_policies::defaults().diagnose.trace
}

impl LegTrace {
    pub(super) fn append_lines(&self, lines: &mut Vec<String>) {
        for traced in self.memories.iter().filter(|traced| traced.grows) {
            let found = &traced.attribution;
            lines.push(format!(
                "{}{}: {} grows by {} a request, {}",
                self.workload,
                if self.control { ", without the prompt cache" } else { "" },
                memory_name(traced.memory),
                ByteAmount(found.measured),
                explained_part(found)
            ));
            for place in self.grown_places(traced) {
                lines.push(self.line(place));
                lines.extend(caller_chain(place));
            }
            if traced.attribution.is_explained() {
                continue;
            }
            match found.follows {
                Some(follows) => {
                    let what = HANDLE_KINDS[follows.kind];
                    lines.push(format!(
                        "  the rest is in no allocation that is counted: it follows {}, {:.2} more a request, {} each \
                         (correlation {:.2})",
                        what.1,
                        follows.per_request,
                        ByteAmount(follows.bytes_each),
                        follows.correlation
                    ));
                    for place in self.handles(what.0) {
                        lines.push(self.line(place));
                        lines.extend(caller_chain(place));
                    }
                }
                None => lines.push(
                    "  the rest is in no allocation that is counted, and follows no handle that is"
                        .to_owned(),
                ),
            }
        }
        if !self.memories.iter().any(|traced| traced.grows) {
            return;
        }
        if self.own_heap {
            lines.push(OWN_HEAP_NOTE.to_owned());
        }
        if self.unfollowed > 0 {
            lines.push(format!(
                "  since the server started {} allocations did not fit into the table of what lives and count as freed",
                self.unfollowed
            ));
        }
        if self.siteless > 0 {
            lines.push(format!(
                "  since the server started {} allocations came from more places than there is room for and are not \
                 counted",
                self.siteless
            ));
        }
    }

    fn grown_places(&self, traced: &MemoryAttribution) -> impl Iterator<Item = &AllocationPlace> {
        let least = (traced.attribution.measured * trace_limits().least_part).max(1.0);
        let grown = self.places.iter().filter(move |place| {
            place.memory == traced.memory
                && self.per_request(place.more_bytes) >= least.max(self.growth_error(place))
        });
        grown.take(trace_limits().named)
    }

    /// Two standard errors of a call site's growth, in bytes per request; 0 if all its blocks are counted.
    fn growth_error(&self, place: &AllocationPlace) -> f64 {
        let bytes = as_f64(place.more_bytes.unsigned_abs());
        let interval = as_f64(self.interval);
        let sampled = place.memory == TracedMemory::Host
            && bytes < place.more_count.abs().max(1.0) * interval * SAMPLED_INTERVALS;
        if sampled { 2.0 * (bytes * interval).sqrt() / as_f64(self.requests.max(1)) } else { 0.0 }
    }

    fn handles(&self, kind: AllocationKind) -> impl Iterator<Item = &AllocationPlace> {
        let makes = move |place: &&AllocationPlace| match kind {
            AllocationKind::Cublas => place.function.starts_with("cublas"),
            _ => place.function.contains("GraphInstantiate"),
        };
        self.places.iter().filter(makes).filter(|place| place.more_count >= 1.0).take(trace_limits().named)
    }

    #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
    fn per_request(&self, bytes: i64) -> f64 {
        bytes as f64 / as_f64(self.requests.max(1))
    }

    fn line(&self, place: &AllocationPlace) -> String {
        let within = place.within.as_ref().map_or_else(String::new, |outer| format!(" within {outer}"));
        let count = place.more_count / as_f64(self.requests.max(1));
        let count = if count < 10.0 { format!("{count:.2}") } else { format!("{count:.0}") };
        let what = match place.memory {
            TracedMemory::Handles => format!("{count} × {} a request", place.function),
            TracedMemory::Host | TracedMemory::Device => {
                let error = self.growth_error(place);
                let error = if error > 0.0 { format!(" ± {}", ByteAmount(error)) } else { String::new() };
                let each = ByteAmount(self.per_request(place.more_bytes));
                format!("{each}{error} a request, {count} × {}{within}", place.function)
            }
        };
        // For a function without a symbol, `called_in` already begins with the library.
        let named = place.module != self.program && !place.called_in.starts_with(&place.module);
        let library = if named { format!(" ({})", place.module) } else { String::new() };
        format!("  {what}, called in {}{library}", place.called_in)
    }
}

const OWN_HEAP_NOTE: &str = "  the program has an allocator of its own (jemalloc, mimalloc, tcmalloc, …) \
     linked into it, so its blocks are not counted, only the mappings that it takes; build it without, or preload that \
     allocator as a library";

/// The counted bytes may exceed the growth: allocated bytes that were never touched use no memory.
fn explained_part(found: &GrowthAttribution) -> String {
    let counted = ByteAmount(found.counted.max(0.0));
    if found.counted > found.measured * (1.0 + trace_limits().untouched) {
        return format!("and counted allocations by {counted}, of which not all was touched");
    }
    format!("of which counted allocations make up {counted} ({:.0} %)", 100.0 * found.explained_share())
}

fn memory_name(memory: TracedMemory) -> &'static str {
    match memory {
        TracedMemory::Host => "host memory",
        TracedMemory::Device => "VRAM",
        TracedMemory::Handles => "the number of handles",
    }
}

fn caller_chain(place: &AllocationPlace) -> Option<String> {
    let names = place.chain.iter().map(ToString::to_string);
    let names: Vec<String> =
        names.skip_while(|name| *name != place.called_in).take(trace_limits().chain).collect();
    (names.len() > 1).then(|| format!("    {}", names.join(" < ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use warden_experiment::{CorrelatedHandles, Workload};
    use warden_tracer_reader::CallFrame;

    fn place(memory: TracedMemory, function: &str, module: &str, called_in: &str) -> AllocationPlace {
        let frame = |function: Option<&str>| CallFrame {
            function: function.map(str::to_owned),
            module: "llama-server".to_owned(),
            offset: 0x1234,
        };
        AllocationPlace {
            memory,
            function: function.to_owned(),
            within: None,
            called_in: called_in.to_owned(),
            module: module.to_owned(),
            chain: [Some(called_in), Some("compute"), None].map(frame).to_vec(),
            live_bytes: 2048,
            live_count: 2.0,
            more_bytes: 2 << 20,
            more_count: 2.0,
            churned_bytes: 2048,
        }
    }

    fn leg(places: Vec<AllocationPlace>, memories: Vec<MemoryAttribution>) -> LegTrace {
        LegTrace {
            workload: Workload::ShortText,
            control: false,
            requests: 2,
            answered: 3,
            memories,
            places,
            program: "llama-server".to_owned(),
            interval: 65_536,
            unfollowed: 0,
            siteless: 0,
            own_heap: false,
        }
    }

    #[test]
    fn what_grows_is_told_with_where_it_comes_from() {
        let grows = |memory, counted: f64, follows| MemoryAttribution {
            memory,
            grows: true,
            attribution: GrowthAttribution {
                measured: 1_048_576.0,
                counted,
                follows,
                along: None,
                retained: false,
            },
            explained: counted / 1_048_576.0,
        };
        let follows =
            CorrelatedHandles { kind: 0, per_request: 1.25, bytes_each: 65_536.0, correlation: 0.99 };
        let places = || {
            let mut inner = place(TracedMemory::Host, "malloc", "llama-server", "std::string::reserve");
            inner.within = Some("operator new".to_owned());
            vec![
                inner,
                place(TracedMemory::Device, "cudaMalloc", "libggml-cuda.so", "pool_alloc"),
                place(TracedMemory::Device, "cudaMalloc", "libcuda.so.1", "libcuda.so.1+0x12"),
                place(TracedMemory::Handles, "cudaGraphInstantiate", "libggml-cuda.so", "capture"),
            ]
        };
        let known = leg(places(), vec![grows(TracedMemory::Host, 1_048_576.0, None)]);
        let of_handles = leg(places(), vec![grows(TracedMemory::Device, 262_144.0, Some(follows))]);
        let unknown = LegTrace {
            control: true,
            unfollowed: 3,
            siteless: 4,
            own_heap: true,
            ..leg(Vec::new(), vec![grows(TracedMemory::Host, 0.0, None)])
        };
        let mut lines = Vec::new();
        for leg in [known, of_handles, unknown] {
            leg.append_lines(&mut lines);
        }
        insta::assert_snapshot!(lines.join("\n"));
    }

    #[test]
    fn a_sentence_never_says_that_a_part_is_more_than_the_whole() {
        let told = |counted: f64| {
            explained_part(&GrowthAttribution {
                measured: 1_048_576.0,
                counted,
                follows: None,
                along: None,
                retained: false,
            })
        };
        assert_eq!(told(524_288.0), "of which counted allocations make up 512.0 KiB (50 %)");
        assert_eq!(told(-100.0), "of which counted allocations make up 0 B (0 %)");
        assert!(told(1_100_000.0).ends_with("(100 %)"));
        assert!(
            told(4_194_304.0).contains("by 4.0 MiB, of which not all was touched"),
            "{}",
            told(4_194_304.0)
        );
    }
}
