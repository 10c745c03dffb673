//! Counts allocations of CUDA's runtime and driver, and handles of cuBLAS.
//!
//! The symbols of a CUDA runtime in a shared library are intercepted here. A runtime linked into the program
//! calls the driver, which `dynamic.rs` intercepts. If both are intercepted, the driver's call has the same
//! kind and is not counted again. Allocations inside a call on the host, or in another kind of memory, are
//! attributed to that call (`count::run_within`).
//!
//! All arguments are pointers, handles or integers, so every function is called with five registers and
//! ignores those beyond its parameters. For example, `cudaGraphInstantiate` had five parameters before CUDA
//! 12 and has three since. In a future major version a name may mean another function: its look-up returns
//! the driver's own function, whose calls are not counted.

use core::ffi::{CStr, c_int, c_void};

use self::CallEffect::{Ends, Maps, Unmaps};
use crate::count::{
    begin_unmap, call_site, end_unmap, record_handle, record_mapping, restore_entry, run_within, take_handle,
};
use crate::layout::AllocationKind::{self, Cublas, Device, GraphExec, Handle, Pinned, Pool};
use crate::layout::number_of;
use crate::ranges::RangeList;
use crate::real::RealFunction;

/// Result without a real function: "initialization error" of the runtime, "not initialized" of the driver,
/// "allocation failed" of cuBLAS.
pub(crate) const MISSING_FUNCTION_ERROR: c_int = 3;

/// A CUDA function with its arguments in registers.
type CudaFn = unsafe extern "C" fn(usize, usize, usize, usize, usize) -> c_int;

#[derive(Clone, Copy)]
enum CallEffect {
    /// The first argument points to the new address or handle; with `sized`, the second is the size.
    Makes {
        function: u32,
        kind: AllocationKind,
        sized: bool,
    },
    /// The first argument is released; it has one of these kinds.
    Ends(&'static [AllocationKind]),
    /// Device memory is mapped at the first argument; the second is the size.
    Maps {
        function: u32,
    },
    Unmaps,
}

pub(crate) struct CudaHook {
    pub(crate) real: &'static RealFunction,
    ours: CudaFn,
    /// Names under which `cuGetProcAddress` finds the function; may be empty.
    names: &'static [LookupName],
    /// `Some` for functions on a stream; `Some(true)` for the variant with per-thread default streams.
    stream: Option<bool>,
}

/// Name of a function for `cuGetProcAddress`. With each name, the runtime passes the interface version since
/// which the function has its present parameters. In the first version, sizes of the oldest functions had 32
/// bits.
struct LookupName {
    name: &'static [u8],
    /// In versions from `from` to below `below`, the name means the function with these parameters.
    from: c_int,
    below: c_int,
}

/// From this version of the interface on, a name may stand for a function with other parameters.
const FIRST_UNKNOWN_VERSION: c_int = 14_000;

/// Returns a name that is valid from this interface version to the last known one.
const fn since(name: &'static [u8], from: c_int) -> LookupName {
    LookupName { name, from, below: FIRST_UNKNOWN_VERSION }
}

const fn until(name: &'static [u8], from: c_int, below: c_int) -> LookupName {
    LookupName { name, from, below }
}

impl CudaHook {
    pub(crate) fn ours(&self) -> *mut c_void {
        self.ours as *mut c_void
    }

    /// Returns `Some` if this name and version mean this function; `Some(true)` for its variant with
    /// per-thread default streams.
    pub(crate) fn match_lookup(&self, name: &[u8], version: c_int) -> Option<bool> {
        let means = |asked: &LookupName| asked.name == name && (asked.from..asked.below).contains(&version);
        self.names.iter().any(means).then_some(self.stream.unwrap_or(false))
    }

    pub(crate) fn is_stream_ordered(&self) -> bool {
        self.stream.is_some()
    }
}

/// # Safety
/// `real` and `effect` belong to the same function, and the caller passes arguments as CUDA requires.
unsafe fn call(real: &RealFunction, effect: CallEffect, registers: [usize; 5]) -> c_int {
    let real = real.get();
    if real.is_null() {
        return MISSING_FUNCTION_ERROR;
    }
    // SAFETY: `real` is the CUDA function that this library's function replaces, and ignores registers beyond
    // its parameters, as the module's documentation says.
    let real = unsafe { core::mem::transmute::<*mut c_void, CudaFn>(real) };
    let [first, second, third, fourth, fifth] = registers;
    // SAFETY: the caller passed these arguments for this function.
    let run = || unsafe { real(first, second, third, fourth, fifth) };
    match effect {
        CallEffect::Makes { function, kind, sized } => {
            let site = call_site(function, kind);
            let error = run_within(site, kind, run);
            let out = core::ptr::with_exposed_provenance::<usize>(first);
            if let (Some(site), 0, false) = (site, error, out.is_null()) {
                // SAFETY: the function has just written an address or handle there, through a pointer to
                // such, which C aligns.
                record_handle(kind, unsafe { *out }, if sized { second } else { 0 }, site);
            }
            error
        }
        Ends(kinds) => {
            let ended = kinds.iter().find_map(|kind| Some((*kind, take_handle(*kind, first)?)));
            let error = run();
            if let (Some((kind, entry)), true) = (ended, error != 0) {
                restore_entry(kind, first, entry);
            }
            error
        }
        Maps { function } => {
            let site = call_site(function, AllocationKind::DeviceMapped);
            let error = run_within(site, AllocationKind::DeviceMapped, run);
            if let (Some(site), 0) = (site, error) {
                record_mapping(RangeList::Device, first, second, site);
            }
            error
        }
        Unmaps => {
            let leaving = begin_unmap(RangeList::Device, first, second);
            let error = run();
            end_unmap(leaving, error == 0);
            error
        }
    }
}

const fn makes(name: &str, kind: AllocationKind, sized: bool) -> CallEffect {
    CallEffect::Makes { function: number_of(name), kind, sized }
}

macro_rules! hooks {
    ($($symbol:ident = $effect:expr, asked $asked:expr, $stream:expr;)*) => {
        $(
            /// # Safety
            /// The caller passes arguments as CUDA requires.
            #[cfg_attr(not(test), unsafe(no_mangle))]
            pub(crate) unsafe extern "C" fn $symbol(a: usize, b: usize, c: usize, d: usize, e: usize) -> c_int {
                // SAFETY: the caller passes arguments as CUDA requires.
                unsafe { call(&real::$symbol, $effect, [a, b, c, d, e]) }
            }
        )*

        #[expect(non_upper_case_globals, reason = "named after the functions")]
        mod real {
            use super::*;
            $(pub(super) static $symbol: RealFunction =
                RealFunction::anywhere(name(concat!(stringify!($symbol), "\0")));)*
        }

        /// All functions that a program may look up by name.
        pub(crate) static HOOKS: [CudaHook; [$(stringify!($symbol)),*].len() + 2] = [
            $(CudaHook { real: &real::$symbol, ours: $symbol, names: $asked, stream: $stream },)*
            CudaHook {
                real: &REAL_GET_PROC_ADDRESS,
                ours: OURS,
                names: &[until(b"cuGetProcAddress", 0, 12_000)],
                stream: None,
            },
            CudaHook {
                real: &REAL_GET_PROC_ADDRESS_V2,
                ours: OURS_V2,
                names: &[since(b"cuGetProcAddress", 12_000)],
                stream: None,
            },
        ];
    };
}

const fn name(with_end: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(with_end.as_bytes()) {
        Ok(name) => name,
        Err(_) => c"",
    }
}

/// Look-up function of the driver, which `dynamic.rs` replaces.
pub(crate) static REAL_GET_PROC_ADDRESS: RealFunction = RealFunction::anywhere(c"cuGetProcAddress");
/// Look-up function of the driver since CUDA 12.
pub(crate) static REAL_GET_PROC_ADDRESS_V2: RealFunction = RealFunction::anywhere(c"cuGetProcAddress_v2");

type UntypedLookupFn =
    unsafe extern "C" fn(*const core::ffi::c_char, *mut *mut c_void, c_int, u64, *mut c_void) -> c_int;
// SAFETY: only the address is used, never called as this type.
const OURS: CudaFn =
    unsafe { core::mem::transmute::<UntypedLookupFn, CudaFn>(crate::dynamic::cuGetProcAddress) };
// SAFETY: only the address is used, never called as this type.
const OURS_V2: CudaFn =
    unsafe { core::mem::transmute::<UntypedLookupFn, CudaFn>(crate::dynamic::cuGetProcAddress_v2) };

/// Kinds that `cudaFree` and similar functions release.
const FREEABLE_KINDS: &[AllocationKind] = &[Device, Pool];

hooks! {
    cudaMalloc = makes("cudaMalloc", Device, true), asked &[], None;
    cudaMallocManaged = makes("cudaMallocManaged", Device, true), asked &[], None;
    cudaFree = Ends(FREEABLE_KINDS), asked &[], None;
    cudaMallocAsync = makes("cudaMallocAsync", Pool, true), asked &[], None;
    cudaMallocAsync_ptsz = makes("cudaMallocAsync", Pool, true), asked &[], None;
    cudaMallocFromPoolAsync = makes("cudaMallocFromPoolAsync", Pool, true), asked &[], None;
    cudaMallocFromPoolAsync_ptsz = makes("cudaMallocFromPoolAsync", Pool, true), asked &[], None;
    cudaFreeAsync = Ends(FREEABLE_KINDS), asked &[], None;
    cudaFreeAsync_ptsz = Ends(FREEABLE_KINDS), asked &[], None;
    cudaHostAlloc = makes("cudaHostAlloc", Pinned, true), asked &[], None;
    cudaMallocHost = makes("cudaMallocHost", Pinned, true), asked &[], None;
    cudaFreeHost = Ends(&[Pinned]), asked &[], None;
    cudaGraphInstantiate = makes("cudaGraphInstantiate", GraphExec, false), asked &[], None;
    cudaGraphInstantiateWithFlags = makes("cudaGraphInstantiateWithFlags", GraphExec, false), asked &[], None;
    cudaGraphInstantiateWithParams = makes("cudaGraphInstantiateWithParams", GraphExec, false),
        asked &[], None;
    cudaGraphExecDestroy = Ends(&[GraphExec]), asked &[], None;
    cublasCreate_v2 = makes("cublasCreate", Cublas, false), asked &[], None;
    cublasDestroy_v2 = Ends(&[Cublas]), asked &[], None;

    cuMemAlloc_v2 = makes("cuMemAlloc", Device, true), asked &[since(b"cuMemAlloc", 3_020)], None;
    cuMemAllocManaged = makes("cuMemAllocManaged", Device, true),
        asked &[since(b"cuMemAllocManaged", 6_000)], None;
    cuMemFree_v2 = Ends(FREEABLE_KINDS), asked &[since(b"cuMemFree", 3_020)], None;
    cuMemAllocAsync = makes("cuMemAllocAsync", Pool, true),
        asked &[since(b"cuMemAllocAsync", 11_020)], Some(false);
    cuMemAllocAsync_ptsz = makes("cuMemAllocAsync", Pool, true),
        asked &[since(b"cuMemAllocAsync", 11_020)], Some(true);
    cuMemAllocFromPoolAsync = makes("cuMemAllocFromPoolAsync", Pool, true),
        asked &[since(b"cuMemAllocFromPoolAsync", 11_020)], Some(false);
    cuMemAllocFromPoolAsync_ptsz = makes("cuMemAllocFromPoolAsync", Pool, true),
        asked &[since(b"cuMemAllocFromPoolAsync", 11_020)], Some(true);
    cuMemFreeAsync = Ends(FREEABLE_KINDS), asked &[since(b"cuMemFreeAsync", 11_020)], Some(false);
    cuMemFreeAsync_ptsz = Ends(FREEABLE_KINDS), asked &[since(b"cuMemFreeAsync", 11_020)], Some(true);
    cuMemHostAlloc = makes("cuMemHostAlloc", Pinned, true), asked &[since(b"cuMemHostAlloc", 2_020)], None;
    cuMemAllocHost_v2 = makes("cuMemAllocHost", Pinned, true), asked &[since(b"cuMemAllocHost", 3_020)], None;
    cuMemFreeHost = Ends(&[Pinned]), asked &[since(b"cuMemFreeHost", 2_000)], None;
    cuMemCreate = makes("cuMemCreate", Handle, true), asked &[since(b"cuMemCreate", 10_020)], None;
    cuMemRelease = Ends(&[Handle]), asked &[since(b"cuMemRelease", 10_020)], None;
    cuMemMap = Maps { function: number_of("cuMemMap") }, asked &[since(b"cuMemMap", 10_020)], None;
    cuMemUnmap = Unmaps, asked &[since(b"cuMemUnmap", 10_020)], None;
    cuGraphInstantiate = makes("cuGraphInstantiate", GraphExec, false),
        asked &[until(b"cuGraphInstantiate", 10_000, 11_000)], None;
    cuGraphInstantiate_v2 = makes("cuGraphInstantiate", GraphExec, false),
        asked &[until(b"cuGraphInstantiate", 11_000, 12_000)], None;
    cuGraphInstantiateWithFlags = makes("cuGraphInstantiateWithFlags", GraphExec, false),
        asked &[since(b"cuGraphInstantiateWithFlags", 11_040), since(b"cuGraphInstantiate", 12_000)], None;
    cuGraphInstantiateWithParams = makes("cuGraphInstantiateWithParams", GraphExec, false),
        asked &[since(b"cuGraphInstantiateWithParams", 12_000)], None;
    cuGraphExecDestroy = Ends(&[GraphExec]), asked &[since(b"cuGraphExecDestroy", 10_000)], None;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_means_a_form_in_the_versions_that_have_it_and_in_none_that_is_not_known() {
        let meant = |name: &[u8], version: c_int| {
            let hook = HOOKS.iter().find(|hook| hook.match_lookup(name, version) == Some(false));
            hook.map(|hook| hook.real.name())
        };
        assert_eq!(meant(b"cuMemAlloc", 3_020), Some(c"cuMemAlloc_v2"));
        assert_eq!(meant(b"cuMemAlloc", 13_010), Some(c"cuMemAlloc_v2"));
        assert_eq!(meant(b"cuGraphInstantiate", 11_000), Some(c"cuGraphInstantiate_v2"));
        assert_eq!(meant(b"cuGraphInstantiate", 13_000), Some(c"cuGraphInstantiateWithFlags"));
        assert_eq!(
            [meant(b"cuMemAlloc", 3_010), meant(b"cuMemAlloc", 14_000), meant(b"cuMemAlloc", c_int::MAX)],
            [None; 3]
        );
    }
}
