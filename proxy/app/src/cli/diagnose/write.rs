//! Writes mitigations into a configuration file: `mitigations` of one model, and nothing else. Comments, order and layout
//! stay. What would not be a valid configuration afterwards is not written.

use std::io::Write as _;
use std::path::Path;

use toml_edit::{Array, DocumentMut, Item, TableLike, value};

use crate::exit::Failure;

/// The text of a configuration with this list for this model.
///
/// # Errors
/// It is no TOML, or has no such model, in words.
fn edited(text: &str, model: &str, list: &[String]) -> Result<String, String> {
    let mut document: DocumentMut = text.parse().map_err(|error| format!("it is no TOML: {error}"))?;
    let models = document.get_mut("models").and_then(Item::as_table_like_mut);
    let own = models.and_then(|models| models.get_mut(model)).and_then(Item::as_table_like_mut);
    let Some(own) = own else { return Err(format!("it has no model `{model}`")) };
    put(own, list);
    Ok(document.to_string())
}

fn put(own: &mut dyn TableLike, list: &[String]) {
    let before = own.get("mitigations").and_then(Item::as_array);
    // What is there stays as it is laid out; only what is new is added.
    let mut array = before.cloned().unwrap_or_default();
    let has = |array: &Array, text: &str| array.iter().any(|item| item.as_str() == Some(text));
    array.retain(|item| item.as_str().is_some_and(|text| list.iter().any(|own| own == text)));
    for text in list {
        if !has(&array, text) {
            array.push(text.as_str());
        }
    }
    match own.get_mut("mitigations").and_then(Item::as_array_mut) {
        Some(place) => {
            let decor = place.decor().clone();
            *place = array;
            *place.decor_mut() = decor;
        }
        None => {
            own.insert("mitigations", value(array));
        }
    }
}

/// Writes it. `validate` reads the new file, which lies beside the old one, and says what is wrong with it.
///
/// # Errors
/// The file cannot be read or written, or would not be valid afterwards; then it is as it was.
pub(super) fn write(
    path: &Path,
    model: &str,
    list: &[String],
    validate: impl FnOnce(&Path) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let fail = |what: &str, why: &dyn std::fmt::Display| {
        Failure::failed(format!("--write: {what} {}: {why}", path.display()))
    };
    let text = std::fs::read_to_string(path).map_err(|error| fail("cannot read", &error))?;
    let new = edited(&text, model, list).map_err(|error| fail("cannot change", &error))?;
    // A link stays one: what it points to is replaced.
    let real = std::fs::canonicalize(path).map_err(|error| fail("cannot find", &error))?;
    let directory = real.parent().unwrap_or_else(|| Path::new("."));
    let mut file = tempfile::Builder::new()
        .prefix(".llama-warden-")
        .suffix(".toml")
        .tempfile_in(directory)
        .map_err(|error| fail("cannot write beside", &error))?;
    let written = file.write_all(new.as_bytes()).and_then(|()| file.as_file().sync_all());
    written.map_err(|error| fail("cannot write beside", &error))?;
    validate(file.path()).map_err(|error| {
        Failure::hinted(
            format!("--write: {} would not be valid with these mitigations: {error}", path.display()),
            "nothing was written; add the lines by hand",
        )
    })?;
    let mode = std::fs::metadata(&real).map(|old| old.permissions());
    let kept = mode.and_then(|mode| std::fs::set_permissions(file.path(), mode));
    kept.map_err(|error| fail("cannot keep the permissions of", &error))?;
    file.persist(&real).map(drop).map_err(|error| fail("cannot replace", &error.error))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(items: &[&str]) -> Vec<String> {
        items.iter().map(|item| (*item).to_owned()).collect()
    }

    const FILE: &str = "# mine\n[server]\nport = 1 # why\n\n[models.\"a.b\"] # first\nbinary = \"x\"\n\n[models.c]\nmitigations = [\n    \"malloc-arenas=4\", # measured\n]\n";

    #[test]
    fn the_list_is_added_to_the_model_and_everything_else_stays() {
        let new = edited(FILE, "a.b", &list(&["graph-cache-cap=8"])).unwrap();
        assert_eq!(
            new,
            FILE.replace("binary = \"x\"\n", "binary = \"x\"\nmitigations = [\"graph-cache-cap=8\"]\n")
        );
    }

    #[test]
    fn a_list_that_is_there_keeps_its_items_and_comments() {
        let new = edited(FILE, "c", &list(&["malloc-arenas=4", "no-cuda-graphs"])).unwrap();
        assert!(new.contains("\"malloc-arenas=4\"") && new.contains("\"no-cuda-graphs\""), "{new}");
        assert!(new.contains("# measured"), "{new}");
        assert_eq!(
            edited(&new, "c", &list(&["malloc-arenas=4", "no-cuda-graphs"])).unwrap(),
            new,
            "twice is once"
        );
    }

    #[test]
    fn inline_tables_and_dotted_keys_are_models_too() {
        let new = edited("models = { m = { binary = \"x\" } }\n", "m", &list(&["a"])).unwrap();
        assert_eq!(new, "models = { m = { binary = \"x\" , mitigations = [\"a\"] } }\n");
        let new = edited("models.m.binary = \"x\"\n", "m", &list(&["a"])).unwrap();
        assert!(new.parse::<DocumentMut>().unwrap()["models"]["m"]["mitigations"].is_array(), "{new}");
    }

    #[test]
    fn what_is_no_configuration_of_the_model_is_told() {
        assert!(edited("[models.x]\n", "m", &[]).unwrap_err().contains("no model `m`"));
        assert!(edited("nonsense [", "m", &[]).unwrap_err().contains("no TOML"));
    }

    #[test]
    fn a_file_that_would_not_be_valid_stays_as_it_is() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("warden.toml");
        std::fs::write(&path, FILE).unwrap();
        let refused = write(&path, "c", &list(&["a"]), |new| {
            assert!(std::fs::read_to_string(new).unwrap().contains("\"a\""));
            Err(Failure::failed("there is no mitigation `a`"))
        });
        assert!(refused.unwrap_err().to_string().contains("there is no mitigation `a`"));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), FILE);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1, "nothing is left behind");
        write(&path, "c", &list(&["malloc-arenas=4", "b"]), |_| Ok(())).unwrap();
        assert!(std::fs::read_to_string(&path).unwrap().contains("\"b\""));
    }
}
