//! Checks that a service's user can run and read the files that the service needs, and proposes commands that
//! fix the access.
//!
//! A folder with an access list counts as accessible, because only a start shows whether it is.

use std::collections::BTreeSet;
use std::fs::Metadata;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use warden_config::settings::ModelConfig;
use warden_config::source::layers::LoadedConfig;
use warden_diagnose::shell;

use crate::access_list::access_list;

/// With `PrivateTmp=yes`, a service sees these folders empty.
const PRIVATE_TMP_DIRS: [&str; 2] = ["/tmp", "/var/tmp"];
const UNKNOWN_UID: u32 = 65_534;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ServiceUser {
    name: String,
    uid: u32,
    groups: BTreeSet<u32>,
    /// The user exists in `/etc/passwd`.
    pub(super) is_there: bool,
}

impl ServiceUser {
    /// A missing user is in no group and owns nothing.
    pub(super) fn read(name: &str, passwd: &str, group: &str) -> Self {
        let mut own = passwd.lines().map(|line| line.split(':').collect::<Vec<_>>());
        let own = own.find(|fields| fields.first() == Some(&name));
        let is_there = own.is_some();
        let number =
            |at: usize| own.as_ref().and_then(|fields| fields.get(at)?.parse().ok()).unwrap_or(UNKNOWN_UID);
        let lists = group.lines().map(|line| line.split(':').collect::<Vec<_>>());
        let of =
            lists.filter(|fields| fields.get(3).is_some_and(|all| all.split(',').any(|one| one == name)));
        let groups = of.filter_map(|fields| fields.get(2)?.parse().ok()).chain([number(3)]).collect();
        Self { name: name.to_owned(), uid: number(2), groups, is_there }
    }

    /// `bits`: 4 to read, 1 to execute or enter.
    fn has_access(&self, facts: &Metadata, bits: u32) -> bool {
        let is_in_group = self.groups.contains(&facts.gid());
        let shift = if facts.uid() == self.uid { 6 } else { 3 * u32::from(is_in_group) };
        self.uid == 0 || (facts.permissions().mode() >> shift) & bits == bits
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NeededFile {
    /// Key in the configuration, or a description of the file.
    what: String,
    path: PathBuf,
    runs: bool,
}

/// Includes files that are separate words of `args` or `command`.
pub(super) fn needed_files(program: &Path, config: &Path, loaded: &LoadedConfig) -> Vec<NeededFile> {
    let beside = config.parent().unwrap_or_else(|| Path::new("/"));
    let one = |what: String, path: &Path, runs: bool| NeededFile { what, path: beside.join(path), runs };
    let mut all = vec![
        one("the program".to_owned(), program, true),
        one("the configuration".to_owned(), config, false),
    ];
    let server = &loaded.settings.server;
    for (key, path) in [("keys", &server.keys), ("tls_cert", &server.tls_cert), ("tls_key", &server.tls_key)]
    {
        if !path.is_empty() && !path.contains(':') {
            all.push(one(format!("server.{key}"), Path::new(path), false));
        }
    }
    for folder in loaded.settings.paths.models.iter().chain(&loaded.settings.paths.patches) {
        all.push(one("a folder of `paths`".to_owned(), folder, false));
    }
    let models = loaded.models.iter().map(|(name, model)| (format!("models.{name}"), model));
    for (of, model) in models.chain([("defaults".to_owned(), &loaded.defaults)]) {
        let ModelConfig { model: file, binary, args, command, .. } = model;
        all.extend(file.iter().map(|file| one(format!("{of}.model"), file, false)));
        all.extend(binary.iter().map(|binary| one(format!("{of}.binary"), binary, true)));
        let words = args.iter().map(Path::new).filter(|word| word.is_absolute());
        all.extend(words.map(|word| one(format!("{of}.args"), word, false)));
        let words = command.iter().map(Path::new).enumerate().filter(|(_, word)| word.is_absolute());
        all.extend(words.map(|(at, word)| one(format!("{of}.command"), word, at == 0)));
    }
    all
}

/// Returns the reason why the service cannot use a file, and the command that fixes this. `None` if the file
/// is usable or does not exist yet. `within` returns where a path of the service is now.
pub(super) fn find_obstacle(
    user: &ServiceUser,
    needed: &NeededFile,
    within: impl Fn(&Path) -> PathBuf,
) -> Option<(String, String)> {
    let path = needed.path.display();
    let what = &needed.what;
    let name = &user.name;
    let meta = |path: &Path| std::fs::metadata(within(path)).ok();
    let facts = meta(&needed.path)?;
    let private = PRIVATE_TMP_DIRS.iter().find(|folder| needed.path.starts_with(folder));
    if let Some(folder) = private.filter(|folder| needed.path != Path::new(folder)) {
        let why = format!(
            "{what}, {path}, is below {folder}, which a service sees as an empty folder (PrivateTmp=yes)"
        );
        let file = needed.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        return Some((why, move_command(needed, &format!("/var/lib/llama-warden/{file}"))));
    }
    let mut folders: Vec<&Path> = needed.path.ancestors().skip(1).collect();
    folders.reverse();
    let is_closed =
        |at: &&&Path| meta(at).is_some_and(|facts| !user.has_access(&facts, 1) && !has_list(&within(at)));
    if let Some(closed) = folders.iter().find(is_closed) {
        let why = format!("user `{name}` cannot enter {} on the way to {what}, {path}", closed.display());
        let open = format!(
            "setfacl -m u:{name}:x {}        # in Debian's package acl; or: chmod o+x",
            quoted(closed)
        );
        return Some((why, open));
    }
    let (bits, access) = match (facts.is_dir(), needed.runs) {
        (true, _) => (5, "rx"),
        (false, true) => (1, "x"),
        (false, false) => (4, "r"),
    };
    if user.has_access(&facts, bits) || has_list(&within(&needed.path)) {
        return None;
    }
    let verb = if needed.runs { "run" } else { "read" };
    let open = format!("setfacl -m u:{name}:{access} {}", quoted(&needed.path));
    Some((format!("user `{name}` cannot {verb} {what}, {path}"), open))
}

fn move_command(needed: &NeededFile, to: &str) -> String {
    let from = quoted(&needed.path);
    if needed.what == "the program" {
        return format!(
            "install -m 755 {from} /usr/local/bin/        # then --program /usr/local/bin/llama-warden"
        );
    }
    format!("mv {from} {to}        # and name it so")
}

fn quoted(path: &Path) -> String {
    shell::quote_word(&path.to_string_lossy())
}

fn has_list(path: &Path) -> bool {
    matches!(access_list(path), Ok(Some(_)))
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};

    use super::*;

    const PASSWD: &str = "root:x:0:0::/:\nllama:x:901:902::/:\n";
    const GROUP: &str = "root:x:0:\nmodels:x:903:x,llama\nothers:x:904:llam\n";

    #[test]
    fn a_user_is_read_with_its_groups_and_one_who_is_not_there_owns_nothing() {
        let user = ServiceUser::read("llama", PASSWD, GROUP);
        assert_eq!((user.uid, user.groups), (901, BTreeSet::from([902, 903])));
        let none = ServiceUser::read("nobody-yet", PASSWD, GROUP);
        assert_eq!((none.uid, none.groups), (UNKNOWN_UID, BTreeSet::from([UNKNOWN_UID])));
    }

    #[test]
    fn what_a_user_cannot_enter_read_or_run_is_named_with_the_command_that_mends_it() {
        let home = tempfile::tempdir().unwrap();
        let set = |name: &str, mode: u32| {
            let path = home.path().join(name);
            fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        };
        fs::create_dir_all(home.path().join("srv/models")).unwrap();
        fs::write(home.path().join("srv/models/a.gguf"), "").unwrap();
        set("", 0o755);
        let user = ServiceUser::read("llama", PASSWD, GROUP);
        let found_at = |path: &str, runs: bool| {
            let needed = NeededFile { what: "models.a.model".to_owned(), path: PathBuf::from(path), runs };
            find_obstacle(&user, &needed, |path| home.path().join(path.strip_prefix("/").unwrap()))
        };
        let file = "/srv/models/a.gguf";
        for (folder, mode, runs, why, mends) in [
            (0o755, 0o644, false, None, ""),
            (
                0o700,
                0o644,
                false,
                Some("cannot enter /srv/models on the way to"),
                "setfacl -m u:llama:x /srv/models ",
            ),
            (
                0o755,
                0o600,
                false,
                Some("user `llama` cannot read models.a.model"),
                "setfacl -m u:llama:r /srv/models/a.gguf",
            ),
            (
                0o755,
                0o644,
                true,
                Some("user `llama` cannot run models.a.model"),
                "setfacl -m u:llama:x /srv/models/a.gguf",
            ),
            (0o755, 0o755, true, None, ""),
        ] {
            set("srv/models", folder);
            set("srv/models/a.gguf", mode);
            let found = found_at(file, runs);
            assert_eq!(found.is_some(), why.is_some(), "{folder:o} {mode:o} {found:?}");
            if let (Some((told, command)), Some(why)) = (found, why) {
                assert!(told.contains(why) && command.starts_with(mends), "{told} {command}");
            }
        }
        assert_eq!(found_at("/srv/models/later.gguf", false), None, "it may come");
        fs::create_dir_all(home.path().join("tmp")).unwrap();
        fs::write(home.path().join("tmp/m.gguf"), "").unwrap();
        let (told, command) = found_at("/tmp/m.gguf", false).unwrap();
        assert!(
            told.contains("PrivateTmp") && command.starts_with("mv /tmp/m.gguf /var/lib/"),
            "{told} {command}"
        );
    }
}
