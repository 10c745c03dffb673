//! Resolves addresses to function names by symbol tables. A stripped library only names its exported
//! functions; an address without a name is shown as an offset in the file.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use object::{Object as _, ObjectSegment as _, ObjectSymbol as _, SymbolKind};
use serde::{Deserialize, Serialize};

use crate::modules::ProcessModules;

/// Step of a call chain.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct CallFrame {
    /// Demangled function name without arguments; `None` if unknown.
    pub function: Option<String>,
    /// Program or library, without its folder.
    pub module: String,
    /// Offset in the file of this module.
    pub offset: u64,
}

impl std::fmt::Display for CallFrame {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.function {
            Some(function) => write!(out, "{function}"),
            None => write!(out, "{}+{:#x}", self.module, self.offset),
        }
    }
}

/// Address, size and symbol name of a function.
type SymbolEntry = (u64, u64, Box<str>);

#[derive(Debug, Default)]
struct SymbolTable {
    /// File offset, length and address of each loaded segment.
    segments: Vec<(u64, u64, u64)>,
    functions: Vec<SymbolEntry>,
}

impl SymbolTable {
    fn read(path: &Path) -> Option<Self> {
        // CUDA's libraries have hundreds of megabytes; the cache reads only the parts in use.
        let cache = object::ReadCache::new(std::fs::File::open(path).ok()?);
        let file = object::File::parse(&cache).ok()?;
        let segments = file.segments().map(|segment| {
            let (offset, length) = segment.file_range();
            (offset, length, segment.address())
        });
        let symbols = file.symbols().chain(file.dynamic_symbols());
        let functions = symbols.filter(|symbol| symbol.is_definition() && symbol.kind() == SymbolKind::Text);
        let mut functions: Vec<SymbolEntry> = functions
            .filter_map(|symbol| Some((symbol.address(), symbol.size(), symbol.name().ok()?.into())))
            .collect();
        functions.sort();
        functions.dedup_by(|one, other| one.0 == other.0);
        Some(Self { segments: segments.collect(), functions })
    }

    fn name(&self, offset: u64) -> Option<&str> {
        let (start, _, address) =
            self.segments.iter().find(|(start, length, _)| (*start..start + length).contains(&offset))?;
        let address = offset - start + address;
        let next = self.functions.partition_point(|(begin, ..)| *begin <= address);
        let (begin, size, name) = self.functions.get(next.checked_sub(1)?)?;
        // Symbols of assembly code may have size 0.
        (*size == 0 || address < begin + size).then_some(name)
    }
}

/// Symbol tables of all files used so far.
#[derive(Debug, Default)]
pub struct SymbolTables {
    tables: BTreeMap<PathBuf, Option<SymbolTable>>,
}

impl SymbolTables {
    /// Returns the frame of a call from its return address.
    pub fn frame(&mut self, modules: &ProcessModules, address: u64) -> CallFrame {
        // The call lies before its return address, which may already belong to the next function.
        let Some((path, offset)) = modules.find(address.saturating_sub(1)) else {
            return CallFrame { function: None, module: "unknown".to_owned(), offset: address };
        };
        let readable = || modules.readable_path(path);
        let table = self.tables.entry(path.to_owned()).or_insert_with(|| SymbolTable::read(&readable()));
        let function = table.as_ref().and_then(|table| table.name(offset)).map(readable_name);
        let module = path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        CallFrame { function, module, offset }
    }
}

fn readable_name(mangled: &str) -> String {
    if let Ok(rust) = rustc_demangle::try_demangle(mangled) {
        return format!("{rust:#}");
    }
    let options = cpp_demangle::DemangleOptions::default().no_params().no_return_type();
    let cpp = cpp_demangle::Symbol::new(mangled)
        .ok()
        .and_then(|symbol| symbol.demangle_with_options(&options).ok());
    let name = cpp.map_or(Cow::Borrowed(mangled), Cow::Owned);
    without_arguments(&name)
}

/// Removes template arguments, which may fill a page.
fn without_arguments(name: &str) -> String {
    let mut depth = 0_usize;
    let mut short = String::with_capacity(name.len());
    let mut rest = name;
    // Angle brackets of an operator's name are no template arguments.
    if let Some(at) = name.find("operator") {
        let after = at + "operator".len();
        let sign = name[after..].bytes().take_while(|byte| b"<>=-".contains(byte)).count();
        if sign > 0 {
            return format!("{}{}", without_arguments(&name[..at]), &name[at..after + sign]);
        }
    }
    while let Some(letter) = rest.chars().next() {
        match letter {
            '<' => depth += 1,
            '>' => depth = depth.saturating_sub(1),
            _ if depth == 0 => short.push(letter),
            _ => {}
        }
        rest = &rest[letter.len_utf8()..];
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_source() {
        for (mangled, name) in [
            ("_ZN14server_context9init_slotEi", "server_context::init_slot"),
            ("_ZNSt6vectorIiSaIiEE9push_backERKi", "std::vector::push_back"),
            ("_ZN4core3fmt9Formatter9write_str17h0123456789abcdefE", "core::fmt::Formatter::write_str"),
            ("cudaGraphInstantiate", "cudaGraphInstantiate"),
            ("_ZlsRSoi", "operator<<"),
        ] {
            assert_eq!(readable_name(mangled), name);
        }
    }

    #[test]
    fn a_function_of_this_program_is_found_by_an_address_within_it() {
        let here = a_function_of_this_program_is_found_by_an_address_within_it as fn() as usize as u64;
        let frame = SymbolTables::default().frame(&ProcessModules::read(std::process::id()), here + 8);
        let function = frame.function.clone().unwrap();
        assert!(function.ends_with("a_function_of_this_program_is_found_by_an_address_within_it"), "{frame}");
    }

    #[test]
    fn what_nothing_names_is_told_by_its_place() {
        let frame = CallFrame { function: None, module: "libcuda.so.1".into(), offset: 0x1234 };
        assert_eq!(frame.to_string(), "libcuda.so.1+0x1234");
        let nowhere = SymbolTables::default().frame(&ProcessModules::default(), 5);
        assert_eq!((nowhere.function, nowhere.module.as_str()), (None, "unknown"));
    }
}
