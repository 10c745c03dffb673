//! Groups call sites by the function that requested the memory, skipping containers and allocation libraries.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::layout::AllocationKind;
use crate::modules::ProcessModules;
use crate::snapshot::{CallSite, TraceSnapshot};
use crate::symbols::{CallFrame, SymbolTables};

/// Kind of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TracedMemory {
    /// Host memory.
    Host,
    /// GPU memory.
    Device,
    /// Handles, which cost memory that no call requests.
    Handles,
}

impl TracedMemory {
    /// Returns the memory that allocations of this kind use.
    pub const fn from_kind(kind: AllocationKind) -> Self {
        match kind {
            AllocationKind::Heap | AllocationKind::Mapped | AllocationKind::Pinned => Self::Host,
            AllocationKind::Device | AllocationKind::Pool | AllocationKind::DeviceMapped => Self::Device,
            AllocationKind::Handle | AllocationKind::GraphExec | AllocationKind::Cublas => Self::Handles,
        }
    }
}

/// Place that allocates.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AllocationPlace {
    /// Kind of memory that is allocated.
    pub memory: TracedMemory,
    /// Allocating function, such as `malloc`.
    pub function: String,
    /// Enclosing CUDA call such as `cudaGraphInstantiate`, if any.
    pub within: Option<String>,
    /// Name or address of the calling function.
    pub called_in: String,
    /// Program or library of the calling function, without its folder.
    pub module: String,
    /// Call chain of the place's largest call site, innermost first.
    pub chain: Vec<CallFrame>,
    /// Estimated live bytes.
    pub live_bytes: i64,
    /// Estimated live allocations.
    pub live_count: f64,
    /// Growth in bytes since the earlier snapshot.
    pub more_bytes: i64,
    /// Growth in allocations since the earlier snapshot.
    pub more_count: f64,
    /// Bytes allocated since the earlier snapshot, live or freed.
    pub churned_bytes: u64,
}

type PlaceKey<'a> = (TracedMemory, &'a str, Option<&'a str>, String);

/// Sums the sites of a snapshot by place, sorted by growth since `before`. Without `before`, everything
/// counts as growth.
pub fn group_by_place(
    before: Option<&TraceSnapshot>,
    now: &TraceSnapshot,
    modules: &ProcessModules,
    symbols: &mut SymbolTables,
) -> Vec<AllocationPlace> {
    let earlier: BTreeMap<u32, &CallSite> =
        before.into_iter().flat_map(|before| &before.sites).map(|site| (site.number, site)).collect();
    let by_number: BTreeMap<u32, &CallSite> = now.sites.iter().map(|site| (site.number, site)).collect();
    let mut found: BTreeMap<PlaceKey<'_>, (AllocationPlace, i64)> = BTreeMap::new();
    for site in &now.sites {
        let outer = site.within.and_then(|number| by_number.get(&number).copied());
        let chain: Vec<CallFrame> = outer
            .unwrap_or(site)
            .addresses
            .iter()
            .map(|address| symbols.frame(modules, *address))
            .skip_while(|frame| frame.module.starts_with(TRACER_MODULE))
            .collect();
        let caller = chain.iter().find(|frame| identifies_requester(frame)).or(chain.first());
        let module = caller.map(|frame| frame.module.clone()).unwrap_or_default();
        let called_in = caller.map_or_else(|| "unknown".to_owned(), ToString::to_string);
        let was = earlier.get(&site.number);
        let more_bytes = site.live_bytes.saturating_sub(was.map_or(0, |was| was.live_bytes));
        let more_count = site.live_count - was.map_or(0.0, |was| was.live_count);
        let churned = site.total_bytes.saturating_sub(was.map_or(0, |was| was.total_bytes));
        let memory = TracedMemory::from_kind(site.kind);
        let within = outer.map(|outer| outer.function);
        let (place, largest) =
            found.entry((memory, site.function, within, called_in.clone())).or_insert_with(|| {
                let place = AllocationPlace {
                    memory,
                    function: site.function.to_owned(),
                    within: within.map(str::to_owned),
                    called_in,
                    module,
                    chain: Vec::new(),
                    live_bytes: 0,
                    live_count: 0.0,
                    more_bytes: 0,
                    more_count: 0.0,
                    churned_bytes: 0,
                };
                (place, i64::MIN)
            });
        place.live_bytes = place.live_bytes.saturating_add(site.live_bytes);
        place.live_count += site.live_count;
        place.more_bytes = place.more_bytes.saturating_add(more_bytes);
        place.more_count += more_count;
        place.churned_bytes = place.churned_bytes.saturating_add(churned);
        if more_bytes > *largest {
            *largest = more_bytes;
            place.chain = chain;
        }
    }
    let mut places: Vec<AllocationPlace> = found.into_values().map(|(place, _)| place).collect();
    places.sort_by(|one, other| {
        other.more_bytes.cmp(&one.more_bytes).then(other.more_count.total_cmp(&one.more_count))
    });
    places
}

const TRACER_MODULE: &str = "libwarden_tracer";

/// Allocation wrappers, which do not identify the caller.
const WRAPPER_NAMES: [&str; 13] = [
    "operator new",
    "std::",
    "__gnu_cxx::",
    "__cxa_",
    "__libc_",
    "__rust",
    "alloc::",
    "core::",
    "memmap2::",
    "__cudart",
    "nlohmann::",
    "ggml_aligned_malloc",
    "_Unwind_",
];

/// Returns true if the frame has a name, and is no container or allocator.
fn identifies_requester(frame: &CallFrame) -> bool {
    let Some(function) = &frame.function else { return false };
    let library =
        ["libc.so", "libstdc++", "libgcc_s", "ld-linux"].iter().any(|start| frame.module.starts_with(start));
    // The CUDA runtime may be linked into the program.
    let runtime = ["cuda", "cublas", "cu"].iter().any(|start| {
        function
            .strip_prefix(start)
            .is_some_and(|rest| rest.starts_with(|letter: char| letter.is_ascii_uppercase()))
    });
    // A Rust name may be `<T as alloc::vec::Something>::function`.
    let bare = function
        .strip_prefix('<')
        .map_or(function.as_str(), |rest| rest.split_once(" as ").map_or(rest, |(_, of)| of));
    !library && !runtime && !WRAPPER_NAMES.iter().any(|start| bare.starts_with(start))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn site(number: u32, kind: AllocationKind, function: &'static str, live_bytes: i64) -> CallSite {
        CallSite {
            number,
            function,
            kind,
            within: None,
            addresses: vec![0x10, 0x20],
            live_bytes,
            live_count: 1.0,
            total_bytes: live_bytes.unsigned_abs(),
            total_count: 1.0,
            peak_bytes: live_bytes.unsigned_abs(),
        }
    }

    fn snapshot(sites: Vec<CallSite>) -> TraceSnapshot {
        TraceSnapshot {
            pid: 1,
            started_unix_ms: 0,
            interval: 65_536,
            exe: "/x".into(),
            own_heap: false,
            losses: crate::TraceLosses::default(),
            sites,
        }
    }

    #[test]
    fn what_grew_most_comes_first_and_sites_of_one_place_are_one() {
        let before = snapshot(vec![site(1, AllocationKind::Heap, "malloc", 1000)]);
        let mut same_place = site(9, AllocationKind::Heap, "malloc", 50);
        same_place.addresses = vec![0x10, 0x99];
        let now = snapshot(vec![
            site(1, AllocationKind::Heap, "malloc", 1100),
            same_place,
            site(2, AllocationKind::Device, "cudaMalloc", 5000),
        ]);
        let found =
            group_by_place(Some(&before), &now, &ProcessModules::default(), &mut SymbolTables::default());
        let told: Vec<_> =
            found.iter().map(|place| (place.memory, place.live_bytes, place.more_bytes)).collect();
        assert_eq!(told, [(TracedMemory::Device, 5000, 5000), (TracedMemory::Host, 1150, 150)]);
    }

    #[test]
    fn memory_of_the_host_within_a_call_into_cuda_is_put_down_to_the_call() {
        let graph = site(3, AllocationKind::GraphExec, "cudaGraphInstantiate", 0);
        let inner = CallSite {
            within: Some(3),
            addresses: Vec::new(),
            ..site(4, AllocationKind::Heap, "malloc", 700)
        };
        let found = group_by_place(
            None,
            &snapshot(vec![graph, inner]),
            &ProcessModules::default(),
            &mut SymbolTables::default(),
        );
        let place = &found[0];
        assert_eq!(
            (place.function.as_str(), place.within.as_deref()),
            ("malloc", Some("cudaGraphInstantiate"))
        );
        assert_eq!((place.more_bytes, place.chain.len()), (700, 2));
        assert_eq!(found[1].memory, TracedMemory::Handles);
    }

    #[test]
    fn a_container_is_not_who_wanted_memory() {
        let frame = |function: &str, module: &str| CallFrame {
            function: Some(function.into()),
            module: module.into(),
            offset: 0,
        };
        assert!(!identifies_requester(&frame("std::vector::push_back", "llama-server")));
        assert!(!identifies_requester(&frame("operator new", "libstdc++.so.6")));
        assert!(!identifies_requester(&CallFrame {
            function: None,
            module: "libcuda.so.1".into(),
            offset: 1
        }));
        assert!(identifies_requester(&frame("llama_decode", "llama-server")));
    }
}
