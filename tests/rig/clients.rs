//! Runs client packages of other projects, pinned by version and hash in the test store, by the programs in
//! `tests/clients`.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::optional::{SharedMeans, or_skipped};
use crate::{Context as _, Home, Trouble, binaries};
use serde_json::{Map, Value};
use sha2::{Digest as _, Sha256};

/// Set in CI, where an unreachable registry is a failure.
pub const REQUIRED_VARIABLE: &str = "WARDEN_TEST_CLIENTS_REQUIRED";

/// A slow registry may need this time.
const INSTALL: Duration = Duration::from_secs(300);
/// Limit for all calls of one program.
const RUN: Duration = Duration::from_secs(120);

/// Installed packages.
#[derive(Debug, Clone)]
pub struct Packages {
    folder: PathBuf,
}

fn programs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("clients")
}

impl Packages {
    /// Installs the packages if needed; prints a line and returns `None` if that failed and is not required.
    ///
    /// # Errors
    /// The installation failed, but is required.
    pub async fn installed() -> Result<Option<Self>, Trouble> {
        static INSTALLED: SharedMeans<Packages> = SharedMeans::new();
        let installed = INSTALLED.get(Self::install).await;
        or_skipped("other people's clients could not be installed", REQUIRED_VARIABLE, installed)
    }

    async fn install() -> Result<Self, Trouble> {
        let pins = ["requirements.txt", "package.json", "package-lock.json"];
        let mut hash = Sha256::new();
        for name in pins {
            let path = programs().join(name);
            hash.update(std::fs::read(&path).context(path.display())?);
        }
        let hash = hex::encode(hash.finalize());
        let folder = binaries::store()?.join("clients").join(hash.get(..16).unwrap_or_default());
        let packages = Self { folder };
        let complete = packages.folder.join("complete");
        if complete.exists() {
            return Ok(packages);
        }
        // Start a half-made installation over.
        if packages.folder.exists() {
            std::fs::remove_dir_all(&packages.folder)?;
        }
        std::fs::create_dir_all(&packages.folder)?;
        let mut home = Home::new()?;
        // The registry's address and certificates come from this machine's environment.
        home.env = std::env::vars_os().collect();
        let venv = packages.folder.join("venv");
        run(&home, "python3", [OsString::from("-m"), "venv".into(), venv.clone().into()]).await?;
        let mut pip: Vec<OsString> =
            ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"].map(OsString::from).into();
        pip.extend(["--only-binary", ":all:", "--require-hashes", "--requirement"].map(OsString::from));
        pip.push(programs().join("requirements.txt").into());
        run(&home, &packages.python().to_string_lossy(), pip).await?;
        for name in ["package.json", "package-lock.json"] {
            std::fs::copy(programs().join(name), packages.folder.join(name))?;
        }
        let mut npm: Vec<OsString> =
            ["ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix"].map(OsString::from).into();
        npm.push(packages.folder.clone().into());
        run(&home, "npm", npm).await?;
        std::fs::write(complete, "")?;
        Ok(packages)
    }

    fn python(&self) -> PathBuf {
        self.folder.join("venv/bin/python")
    }

    /// Runs a program of `tests/clients` against a server; returns the results by the names of cases.
    ///
    /// # Errors
    /// The program fails, or prints no results.
    pub async fn run(&self, program: &str, args: &[&str]) -> Result<BTreeMap<String, Value>, Trouble> {
        let home = Home::new()?;
        let script = programs().join(program);
        let mut words: Vec<OsString> = vec![script.into()];
        words.extend(args.iter().map(OsString::from));
        let runner = if Path::new(program).extension().is_some_and(|end| end == "mjs") {
            words.push(self.folder.clone().into());
            PathBuf::from("node")
        } else {
            words.insert(0, "-B".into());
            self.python()
        };
        let ran = home.run(&runner, words, RUN).await?;
        if ran.code != 0 {
            return Err(Trouble::new(format!("{program} {args:?}: {}", ran.all())));
        }
        serde_json::from_str(&ran.stdout).context(format!("{program} {args:?}: {}", ran.all()))
    }
}

async fn run(home: &Home, program: &str, words: impl IntoIterator<Item = OsString>) -> Result<(), Trouble> {
    let ran = home.run(Path::new(program), words, INSTALL).await?;
    if ran.code == 0 { Ok(()) } else { Err(Trouble::new(format!("{program}: {}", ran.all()))) }
}

/// Fields left out of a comparison: names with reasons, from `tests/clients/ignored.json`.
#[derive(Debug)]
pub struct Ignored {
    fields: Map<String, Value>,
    headers: Map<String, Value>,
}

impl Ignored {
    /// Reads the list.
    ///
    /// # Errors
    /// The file is no such list.
    pub fn read() -> Result<Self, Trouble> {
        let path = programs().join("ignored.json");
        let mut all: Map<String, Value> = serde_json::from_slice(&std::fs::read(&path)?)?;
        let mut part = |name: &str| match all.remove(name) {
            Some(Value::Object(part)) => Ok(part),
            other => Err(Trouble::new(format!("{}: {name} is {other:?}", path.display()))),
        };
        Ok(Self { fields: part("fields")?, headers: part("headers")? })
    }

    /// Replaces the ignored fields of a value by a mark, so that their presence is still compared.
    pub fn strip(&self, value: &mut Value) {
        match value {
            Value::Object(map) => {
                if let Some(Value::Object(headers)) = map.get_mut("headers") {
                    headers.retain(|name, _| !self.headers.contains_key(name));
                }
                for (name, inner) in map.iter_mut() {
                    if self.fields.contains_key(name) && !inner.is_null() {
                        *inner = "-".into();
                    } else {
                        self.strip(inner);
                    }
                }
            }
            Value::Array(all) => all.iter_mut().for_each(|inner| self.strip(inner)),
            _ => {}
        }
    }
}

/// Returns the place and kind of the first difference between two values.
pub fn difference(place: &str, one: &Value, two: &Value) -> Option<String> {
    match (one, two) {
        (Value::Object(a), Value::Object(b)) => {
            let names: std::collections::BTreeSet<&String> = a.keys().chain(b.keys()).collect();
            let null = Value::Null;
            names.into_iter().find_map(|name| match (a.get(name), b.get(name)) {
                (Some(_), Some(_)) | (None, None) => difference(
                    &format!("{place}.{name}"),
                    a.get(name).unwrap_or(&null),
                    b.get(name).unwrap_or(&null),
                ),
                (has, other) => Some(format!("{place}.{name}: {has:?} against {other:?}")),
            })
        }
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => {
            let pairs = a.iter().zip(b).enumerate();
            pairs.into_iter().find_map(|(n, (a, b))| difference(&format!("{place}[{n}]"), a, b))
        }
        _ if one == two => None,
        _ => Some(format!("{place}: {one} against {two}")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_ignored_must_still_be_there() -> crate::Outcome {
        let ignored = Ignored::read()?;
        let strip = |mut value: Value| {
            ignored.strip(&mut value);
            value
        };
        let one =
            strip(json!({"id": "a", "text": [{"created": 1}], "headers": {"date": "x", "server": "y"}}));
        let two = strip(json!({"id": "b", "text": [{"created": 2}], "headers": {"server": "y"}}));
        assert_eq!(difference("it", &one, &two), None);
        let without = strip(json!({"text": [{"created": 2}], "headers": {"server": "y"}}));
        assert!(difference("it", &one, &without).is_some_and(|found| found.starts_with("it.id: ")));
        let other = strip(json!({"id": "b", "text": [{"created": 2, "x": 1}], "headers": {"server": "y"}}));
        assert!(difference("it", &one, &other).is_some_and(|found| found.starts_with("it.text[0].x: ")));
        Ok(())
    }
}
