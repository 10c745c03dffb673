//! Writes the `mitigations` of one model into a configuration file. Preserves everything else: comments,
//! layout, owner, mode and access list. Refuses to write an invalid configuration.

use std::fs::{File, Metadata};
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, fchown};
use std::path::Path;

use rustix::fs::{XattrFlags, fremovexattr, fsetxattr};
use rustix::io::Errno;
use toml_edit::{Array, DocumentMut, Item, RawString, TableLike, Value, value};

use crate::access_list::{self, access_list};
use crate::exit::CommandError;

fn with_mitigations(text: &str, model: &str, list: &[String]) -> Result<String, String> {
    let mut document: DocumentMut = text.parse().map_err(|error| format!("it is no TOML: {error}"))?;
    let models = document.get_mut("models").and_then(Item::as_table_like_mut);
    let own = models.and_then(|models| models.get_mut(model)).and_then(Item::as_table_like_mut);
    let Some(own) = own else { return Err(format!("it has no model `{model}`")) };
    merge_mitigations(own, list);
    Ok(document.to_string())
}

fn merge_mitigations(own: &mut dyn TableLike, list: &[String]) {
    if let Some(array) = own.get_mut("mitigations").and_then(Item::as_array_mut) {
        for text in list {
            if !array.iter().any(|item| item.as_str() == Some(text)) {
                append_item(array, text);
            }
        }
        return;
    }
    own.insert("mitigations", value(list.iter().collect::<Array>()));
}

/// Leaves a comment after the previous item in place. Puts the new item of a multi-line list on its own line.
fn append_item(array: &mut Array, text: &str) {
    let raw = |text: Option<&RawString>| text.and_then(RawString::as_str).unwrap_or_default().to_owned();
    // Text between the last item and the end of the list, before and after its comma.
    let mut end = raw(Some(array.trailing()));
    let mut indent = None;
    let last = array.len().checked_sub(1).and_then(|last| array.get_mut(last));
    if let Some(last) = last {
        end.insert_str(0, &raw(last.decor().suffix()));
        let prefix = raw(last.decor().prefix());
        indent = prefix.rsplit_once('\n').map(|(_, indent)| indent.to_owned());
        last.decor_mut().set_suffix("");
    }
    if let Some((before, rest)) = end.rsplit_once('\n') {
        let mut item = Value::from(text);
        let indent = indent.unwrap_or_else(|| format!("{rest}    "));
        item.decor_mut().set_prefix(format!("{before}\n{indent}"));
        array.push_formatted(item);
        array.set_trailing(format!("\n{rest}"));
        array.set_trailing_comma(true);
    } else {
        let comma = array.trailing_comma();
        array.push(text);
        array.set_trailing(end);
        array.set_trailing_comma(comma);
    }
}

/// `validate` checks the new file, which is in the same folder as the old one.
///
/// # Errors
/// The file cannot be read or written, or would be invalid. The old file is then unchanged.
pub(super) fn write_mitigations(
    path: &Path,
    model: &str,
    list: &[String],
    validate: impl FnOnce(&Path) -> Result<(), CommandError>,
) -> Result<(), CommandError> {
    let fail = |what: &str, why: &dyn std::fmt::Display| {
        CommandError::failed(format!("--write: {what} {}: {why}", path.display()))
    };
    let text = std::fs::read_to_string(path).map_err(|error| fail("cannot read", &error))?;
    let new = with_mitigations(&text, model, list).map_err(|error| fail("cannot change", &error))?;
    // Replace the target of a symbolic link, not the link.
    let real = std::fs::canonicalize(path).map_err(|error| fail("cannot find", &error))?;
    let directory = real.parent().unwrap_or_else(|| Path::new("."));
    let mut file = tempfile::Builder::new()
        .prefix(".llama-warden-")
        .suffix(".toml")
        .tempfile_in(directory)
        .map_err(|error| fail("cannot write next to", &error))?;
    let written = file.write_all(new.as_bytes()).and_then(|()| file.as_file().sync_all());
    written.map_err(|error| fail("cannot write next to", &error))?;
    validate(file.path()).map_err(|error| {
        CommandError::hinted(
            format!("--write: {} would not be valid with these mitigations: {error}", path.display()),
            "nothing was written; add the lines by hand",
        )
    })?;
    let kept = std::fs::metadata(&real).and_then(|old| copy_ownership(file.as_file(), &real, &old));
    kept.map_err(|error| {
        CommandError::hinted(
            format!("--write: cannot keep owner, mode and access list of {}: {error}", path.display()),
            "nothing was written; run it as the owner of the file, or add the lines by hand",
        )
    })?;
    file.persist(&real).map(drop).map_err(|error| fail("cannot replace", &error.error))
}

fn copy_ownership(new: &File, path: &Path, old: &Metadata) -> io::Result<()> {
    let own = new.metadata()?;
    if (own.uid(), own.gid()) != (old.uid(), old.gid()) {
        fchown(new, Some(old.uid()), Some(old.gid()))?;
    }
    // With an access list, the group bits of the mode are its mask; without the list they would grant the
    // group access.
    match access_list(path)? {
        Some(list) => fsetxattr(new, access_list::ACL_ATTRIBUTE, &list, XattrFlags::empty())?,
        // Remove a list that the new file inherited from its folder.
        None => match fremovexattr(new, access_list::ACL_ATTRIBUTE) {
            Ok(()) | Err(Errno::NODATA | Errno::NOTSUP) => {}
            Err(error) => return Err(error.into()),
        },
    }
    // Set the mode last, because a change of owner clears mode bits.
    new.set_permissions(old.permissions())
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
        let new = with_mitigations(FILE, "a.b", &list(&["graph-cache-cap=8"])).unwrap();
        assert_eq!(
            new,
            FILE.replace("binary = \"x\"\n", "binary = \"x\"\nmitigations = [\"graph-cache-cap=8\"]\n")
        );
    }

    #[test]
    fn a_list_that_is_there_keeps_its_items_and_comments() {
        let new = with_mitigations(FILE, "c", &list(&["malloc-arenas=4", "no-cuda-graphs"])).unwrap();
        assert!(new.contains("\"malloc-arenas=4\"") && new.contains("\"no-cuda-graphs\""), "{new}");
        assert!(new.contains("# measured"), "{new}");
        assert_eq!(
            with_mitigations(&new, "c", &list(&["malloc-arenas=4", "no-cuda-graphs"])).unwrap(),
            new,
            "twice is once"
        );
    }

    #[test]
    fn a_new_item_gets_a_line_of_its_own_and_every_comment_stays_beside_its_item() {
        let added = |text: &str| {
            with_mitigations(&format!("[models.m]\nmitigations = {text}\n"), "m", &list(&["a", "b", "new"]))
                .unwrap()
        };
        for (before, after) in [
            (
                "[\n    \"a\", # why a\n    \"b\", # why b\n]",
                "[\n    \"a\", # why a\n    \"b\", # why b\n    \"new\",\n]",
            ),
            ("[\n  \"a\",\n  \"b\" # why b\n] # all", "[\n  \"a\",\n  \"b\", # why b\n  \"new\",\n] # all"),
            (
                "[\n  \"a\", \"b\",\n  # more to come\n]",
                "[\n  \"a\", \"b\",\n  # more to come\n    \"new\",\n]",
            ),
            ("[\"a\", \"b\"] # all", "[\"a\", \"b\", \"new\"] # all"),
            ("[ \"a\", \"b\", ]", "[ \"a\", \"b\", \"new\", ]"),
            ("[]", "[\"a\", \"b\", \"new\"]"),
        ] {
            let whole = added(before);
            assert_eq!(whole, format!("[models.m]\nmitigations = {after}\n"), "from {before}");
        }
    }

    #[test]
    fn owner_and_mode_of_the_file_stay() {
        use std::os::unix::fs::PermissionsExt as _;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("warden.toml");
        std::fs::write(&path, FILE).unwrap();
        // Only root can change the owner; for other users, the test checks that it stays.
        let root = std::os::unix::fs::chown(&path, Some(1234), Some(4321)).is_ok();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        let before = path.metadata().unwrap();
        write_mitigations(&path, "c", &list(&["malloc-arenas=4", "b"]), |_| Ok(())).unwrap();
        let after = path.metadata().unwrap();
        assert!(std::fs::read_to_string(&path).unwrap().contains("\"b\""));
        assert_eq!((after.uid(), after.gid(), after.mode()), (before.uid(), before.gid(), before.mode()));
        assert!(!root || after.uid() == 1234);
    }

    #[test]
    fn the_access_list_of_the_file_stays_and_nobody_else_is_let_in() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("warden.toml");
        std::fs::write(&path, FILE).unwrap();
        // Version 2; owner rw, user 1234 r, group none, mask r, others none: the mode shows the group as
        // readers.
        let mut acl = 2_u32.to_le_bytes().to_vec();
        for (tag, may, id) in
            [(1_u16, 6_u16, u32::MAX), (2, 4, 1234), (4, 0, u32::MAX), (16, 4, u32::MAX), (32, 0, u32::MAX)]
        {
            acl.extend([&tag.to_le_bytes()[..], &may.to_le_bytes()[..], &id.to_le_bytes()[..]].concat());
        }
        let file = File::open(&path).unwrap();
        if let Err(error) = fsetxattr(&file, access_list::ACL_ATTRIBUTE, &acl, XattrFlags::empty()) {
            // Skip on a file system without access lists.
            assert_eq!(error, Errno::NOTSUP);
            return;
        }
        write_mitigations(&path, "c", &list(&["malloc-arenas=4", "b"]), |_| Ok(())).unwrap();
        assert_eq!(access_list(&path).unwrap(), Some(acl));
        // A list that new files inherit from the folder does not belong to the file.
        let plain = directory.path().join("plain.toml");
        std::fs::write(&plain, FILE).unwrap();
        let folder = File::open(directory.path()).unwrap();
        let of_folder = access_list(&path).unwrap().unwrap();
        fsetxattr(&folder, "system.posix_acl_default", &of_folder, XattrFlags::empty()).unwrap();
        write_mitigations(&plain, "c", &list(&["malloc-arenas=4", "b"]), |_| Ok(())).unwrap();
        assert_eq!(access_list(&plain).unwrap(), None);
    }

    #[test]
    fn inline_tables_and_dotted_keys_are_models_too() {
        let new = with_mitigations("models = { m = { binary = \"x\" } }\n", "m", &list(&["a"])).unwrap();
        assert_eq!(new, "models = { m = { binary = \"x\" , mitigations = [\"a\"] } }\n");
        let new = with_mitigations("models.m.binary = \"x\"\n", "m", &list(&["a"])).unwrap();
        assert!(new.parse::<DocumentMut>().unwrap()["models"]["m"]["mitigations"].is_array(), "{new}");
    }

    #[test]
    fn what_is_no_configuration_of_the_model_is_told() {
        assert!(with_mitigations("[models.x]\n", "m", &[]).unwrap_err().contains("no model `m`"));
        assert!(with_mitigations("nonsense [", "m", &[]).unwrap_err().contains("no TOML"));
    }

    #[test]
    fn a_file_that_would_not_be_valid_stays_as_it_is() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("warden.toml");
        std::fs::write(&path, FILE).unwrap();
        let refused = write_mitigations(&path, "c", &list(&["a"]), |new| {
            assert!(std::fs::read_to_string(new).unwrap().contains("\"a\""));
            Err(CommandError::failed("there is no mitigation `a`"))
        });
        assert!(refused.unwrap_err().to_string().contains("there is no mitigation `a`"));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), FILE);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1, "nothing is left behind");
        write_mitigations(&path, "c", &list(&["malloc-arenas=4", "b"]), |_| Ok(())).unwrap();
        assert!(std::fs::read_to_string(&path).unwrap().contains("\"b\""));
    }
}
