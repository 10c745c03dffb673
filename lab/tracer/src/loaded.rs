//! Searches libraries outside the program's global scope. Another library may have opened them locally, under
//! any file name (`libcudart.so.13`, a file of a Python package, a copy), so the search is by function.

use core::ffi::{CStr, c_char, c_int, c_void};

use crate::sys::{self, DynamicEntry, ElfSymbol, LoadedObject, ProgramHeader};

const MAX_PATH: usize = 4096;

struct FunctionSearch<'a> {
    name: &'a CStr,
    found: usize,
    path: [u8; MAX_PATH],
}

/// Finds a function in any library but this one, and keeps its library loaded; null if none has it.
pub(crate) fn find_function(name: &CStr) -> *mut c_void {
    let mut search = FunctionSearch { name, found: 0, path: [0; MAX_PATH] };
    // SAFETY: `search` has the type that `search_object` expects, and outlives the call.
    unsafe { sys::dl_iterate_phdr(search_object, (&raw mut search).cast()) };
    // Keep the library loaded, because an address in it is stored. The iteration held a lock of the loader.
    if search.found == 0 || !keep_library(&search.path) {
        return core::ptr::null_mut();
    }
    core::ptr::with_exposed_provenance_mut(search.found)
}

/// Returns false if the library was unloaded meanwhile. The program itself has no path and stays loaded.
fn keep_library(path: &[u8; MAX_PATH]) -> bool {
    if path.first().copied().unwrap_or_default() == 0 {
        return true;
    }
    // SAFETY: the path ends in a zero.
    unsafe { !sys::dlopen(path.as_ptr().cast::<c_char>(), sys::RTLD_LAZY | sys::RTLD_NOLOAD).is_null() }
}

/// Keeps the library of this address loaded; returns false if it was unloaded meanwhile. An address outside
/// of any library, such as a stub made by the driver, needs nothing.
pub(crate) fn keep_loaded(address: *mut c_void) -> bool {
    keep_library(&object_at(address).path)
}

pub(crate) fn is_ours(address: *mut c_void) -> bool {
    object_at(address).is_ours
}

/// Search by address, with its result.
struct ObjectSearch {
    address: usize,
    is_ours: bool,
    /// Path of the object that has the address, with a terminating zero; empty for the main program, and if no
    /// object has it.
    path: [u8; MAX_PATH],
}

fn object_at(address: *mut c_void) -> ObjectSearch {
    /// # Safety
    /// `object` is the loader's description, and `search` an [`ObjectSearch`] that no other code accesses.
    unsafe extern "C" fn look(object: *const LoadedObject, _: usize, search: *mut c_void) -> c_int {
        // SAFETY: the caller of `look` guarantees both pointers.
        let (object, search) = unsafe { (&*object, &mut *search.cast::<ObjectSearch>()) };
        // SAFETY: as above.
        if unsafe { !contains_address(object, search.address) } {
            return 0;
        }
        // SAFETY: as above.
        unsafe {
            search.is_ours = contains_address(object, own_address());
            copy_path(object, &mut search.path);
        }
        1
    }
    let mut search = ObjectSearch { address: address.addr(), is_ours: false, path: [0; MAX_PATH] };
    // SAFETY: as in `find_function`.
    unsafe { sys::dl_iterate_phdr(look, (&raw mut search).cast()) };
    search
}

/// Returns false if the path is too long.
unsafe fn copy_path(object: &LoadedObject, path: &mut [u8; MAX_PATH]) -> bool {
    // SAFETY: a name is a C string of the loader.
    let name = if object.name.is_null() { c"" } else { unsafe { CStr::from_ptr(object.name) } };
    let bytes = name.to_bytes_with_nul();
    let Some(room) = path.get_mut(..bytes.len()) else { return false };
    room.copy_from_slice(bytes);
    true
}

/// Returns an address in this library, of a function that cannot be interposed.
fn own_address() -> usize {
    (search_object as sys::EachObject as *const c_void).addr()
}

/// Searches one library; the loader calls this for each.
///
/// # Safety
/// `object` is the loader's description and stays valid during this call; `search` is a [`FunctionSearch`]
/// that no other code accesses.
unsafe extern "C" fn search_object(object: *const LoadedObject, _: usize, search: *mut c_void) -> c_int {
    // SAFETY: the caller guarantees both pointers.
    let (object, search) = unsafe { (&*object, &mut *search.cast::<FunctionSearch<'_>>()) };
    // SAFETY: as above.
    let found = unsafe {
        if contains_address(object, own_address()) { None } else { exported_function(object, search.name) }
    };
    let Some(found) = found else { return 0 };
    // SAFETY: as above.
    if unsafe { !copy_path(object, &mut search.path) } {
        return 0;
    }
    search.found = found;
    1
}

/// # Safety
/// `object` is the loader's description; also applies to all functions below.
unsafe fn segments(object: &LoadedObject) -> &[ProgramHeader] {
    if object.segments.is_null() {
        return &[];
    }
    // SAFETY: the loader's table has `segment_count` entries.
    unsafe { core::slice::from_raw_parts(object.segments, usize::from(object.segment_count)) }
}

unsafe fn contains_address(object: &LoadedObject, address: usize) -> bool {
    // SAFETY: the caller passes the loader's description.
    unsafe { segments(object) }.iter().any(|segment| {
        let start = object.base.wrapping_add(segment.address);
        segment.kind == sys::PT_LOAD && address.wrapping_sub(start) < segment.bytes_in_memory
    })
}

unsafe fn exported_function(object: &LoadedObject, name: &CStr) -> Option<usize> {
    // SAFETY: the caller passes the loader's description.
    let dynamic = unsafe { segments(object) }.iter().find(|segment| segment.kind == sys::PT_DYNAMIC)?;
    let mut entry =
        core::ptr::with_exposed_provenance::<DynamicEntry>(object.base.wrapping_add(dynamic.address));
    let mut symbols = 0;
    let mut strings = 0;
    let mut gnu = 0;
    let mut old = 0;
    loop {
        // SAFETY: `entry` is in the dynamic table of a loaded object, and a zero tag ends that table.
        let DynamicEntry { tag, value } = unsafe { *entry };
        // The loader has replaced these offsets by addresses, except in the vDSO.
        let address = if value < object.base { value.wrapping_add(object.base) } else { value };
        match tag {
            0 => break,
            sys::DT_SYMTAB => symbols = address,
            sys::DT_STRTAB => strings = address,
            sys::DT_GNU_HASH => gnu = address,
            sys::DT_HASH => old = address,
            _ => {}
        }
        // SAFETY: a zero tag ends the table, and this entry has another tag, so there is a next entry.
        entry = unsafe { entry.add(1) };
    }
    if symbols == 0 || strings == 0 {
        return None;
    }
    let symbols = core::ptr::with_exposed_provenance::<ElfSymbol>(symbols);
    let is_it = |index: u32| {
        // SAFETY: the index comes from the object's own hash table, and the name from the object's own
        // strings.
        unsafe {
            let symbol = *symbols.add(index as usize);
            let at = core::ptr::with_exposed_provenance::<c_char>(strings.wrapping_add(symbol.name as usize));
            (symbol.is_function_for_others() && CStr::from_ptr(at) == name)
                .then(|| object.base.wrapping_add(symbol.value))
        }
    };
    // SAFETY: the tables belong to a loaded object.
    unsafe {
        match (gnu, old) {
            (0, 0) => None,
            (0, old) => look_up_sysv_hash(old, name, is_it),
            (gnu, _) => look_up_gnu_hash(gnu, name, is_it),
        }
    }
}

/// Looks a name up in a GNU hash table: header (buckets, first symbol, filter words, shift), filter, buckets,
/// and for each symbol its hash, whose lowest bit marks the end of a bucket.
unsafe fn look_up_gnu_hash(table: usize, name: &CStr, is_it: impl Fn(u32) -> Option<usize>) -> Option<usize> {
    let words = core::ptr::with_exposed_provenance::<u32>(table);
    let hash = name
        .to_bytes()
        .iter()
        .fold(5381_u32, |hash, byte| hash.wrapping_mul(33).wrapping_add(u32::from(*byte)));
    // SAFETY: counts and indexes are read from the table itself, so no access leaves the table.
    unsafe {
        let buckets = *words;
        let first = *words.add(1);
        let filter = *words.add(2);
        if buckets == 0 {
            return None;
        }
        let heads = words.add(4 + 2 * filter as usize);
        let hashes = heads.add(buckets as usize);
        let mut index = *heads.add((hash % buckets) as usize);
        if index < first {
            return None;
        }
        loop {
            let other = *hashes.add((index - first) as usize);
            if other | 1 == hash | 1
                && let Some(found) = is_it(index)
            {
                return Some(found);
            }
            if other & 1 == 1 {
                return None;
            }
            index += 1;
        }
    }
}

/// Looks a name up in a System V hash table: number of buckets and of symbols, buckets, and for each symbol
/// the index of the next symbol in its bucket.
unsafe fn look_up_sysv_hash(
    table: usize,
    name: &CStr,
    is_it: impl Fn(u32) -> Option<usize>,
) -> Option<usize> {
    let words = core::ptr::with_exposed_provenance::<u32>(table);
    let hash = name.to_bytes().iter().fold(0_u32, |hash, byte| {
        let hash = (hash << 4).wrapping_add(u32::from(*byte));
        let high = hash & 0xf000_0000;
        (hash ^ (high >> 24)) & !high
    });
    // SAFETY: counts and indexes are read from the table itself, so no access leaves the table.
    unsafe {
        let buckets = *words;
        if buckets == 0 {
            return None;
        }
        let nexts = words.add(2 + buckets as usize);
        let mut index = *words.add(2 + (hash % buckets) as usize);
        while index != 0 {
            if let Some(found) = is_it(index) {
                return Some(found);
            }
            index = *nexts.add(index as usize);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_of_another_library_is_found_and_one_of_none_is_not() {
        let getpid = sys::getpid as unsafe extern "C" fn() -> c_int as *mut c_void;
        let found = find_function(c"getpid");
        assert!(found == getpid && !is_ours(found), "{found:?} {getpid:?}");
        assert!(find_function(c"a_function_that_nobody_has").is_null());
        assert!(is_ours(own_address() as *mut c_void));
    }
}
