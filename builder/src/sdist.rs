//! Obtains the source archive of llama-cpp-python through pip: a copy of llama.cpp that any Python index can serve.
//!
//! The version and the bytes are pinned by the caller, so whatever index answers, the source is the same. Who asks for the newest version
//! instead trusts the index as pip does: whatever it names first is remembered by its hash, as any archive is. pip wants
//! to know a source package's metadata before it hands it over, and that asks for the package's build backend; it
//! is installed first and build isolation is off, which saves building cmake.

use std::fs;
use std::path::{Path, PathBuf};

use tokio::task::spawn_blocking;
use tokio_util::sync::CancellationToken;

use crate::environment::Environment;
use crate::error::{Error, Result, io_error};
use crate::event::{Event, Reporter};
use crate::lock::Lock;
use crate::process::output;
use crate::source::{Source, file_sha256};
use crate::toolchain::finish;
use crate::toolchain::venv::Venv;

/// The package's name.
const PROJECT: &str = "llama-cpp-python";

/// Which archive is wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pin {
    /// The package's version, such as `0.3.36`.
    pub version: String,
    /// sha256 of the archive, 64 hexadecimal digits.
    pub sha256: String,
}

impl Pin {
    /// The identity that a source has which is this archive.
    fn identity(&self) -> String {
        format!("archive-sha256:{}", self.sha256)
    }

    fn mismatch(&self, path: PathBuf, found: String) -> Error {
        Error::WrongHash { path, found, expected: self.sha256.clone() }
    }
}

/// What it takes to ask pip.
pub(crate) struct Pip<'a> {
    pub(crate) cache: &'a Path,
    pub(crate) env: &'a Environment,
    pub(crate) reporter: &'a Reporter,
    pub(crate) cancel: &'a CancellationToken,
}

/// A file that pip can fetch, and its place in the cache.
pub(crate) struct PipDownload {
    /// Path of the finished file in the cache.
    pub(crate) path: PathBuf,
    /// Name of the lock that keeps other processes from fetching the same file.
    pub(crate) lock: String,
    /// The file and the size of the download, for the reporter.
    pub(crate) what: String,
    /// The step, for errors.
    pub(crate) doing: String,
    /// Text of a requirements file.
    pub(crate) requirements: String,
    /// Each requirement has a hash, and pip is to insist on that.
    pub(crate) is_hashed: bool,
}

/// Compares the sha256 of a file with the pinned one (64 hexadecimal digits).
///
/// # Errors
///
/// The file cannot be read, its hash is another one, or it was cancelled.
#[expect(clippy::disallowed_methods, reason = "in a command, which serves nobody")]
pub(crate) async fn check_sha256(path: &Path, expected: &str, cancel: &CancellationToken) -> Result<()> {
    let (file, token) = (path.to_owned(), cancel.clone());
    let hashed = spawn_blocking(move || file_sha256(&file, &token)).await;
    let found = hashed.unwrap_or(Err(Error::Cancelled))?;
    if found == expected {
        return Ok(());
    }
    Err(Error::WrongHash { path: path.to_owned(), found, expected: expected.to_owned() })
}

impl Pip<'_> {
    /// The pinned archive's path in the cache: at once if it is there, else through pip (some 80 MB).
    ///
    /// # Errors
    ///
    /// It is not in the cache and pip cannot fetch it, its hash is another than the pinned one, or it was cancelled.
    pub(crate) async fn obtain(&self, pin: &Pin) -> Result<PathBuf> {
        self.get(&pin.version, Some(pin)).await
    }

    /// The newest version that pip finds, and its archive's path; the pinned one, if none is newer than that.
    ///
    /// # Errors
    ///
    /// pip cannot say or fetch it, or it was cancelled.
    pub(crate) async fn newest(&self, pinned: &Pin) -> Result<(String, PathBuf)> {
        let venv = Venv::new(self.cache);
        venv.ready(self.env, self.reporter, self.cancel).await?;
        let mut asking = venv.pip(self.env);
        // `-v` takes back the `-q` that pip is always run with: with that it would print no versions.
        asking.args(["-v", "index", "versions", "--no-binary", PROJECT, PROJECT]);
        let doing = format!("asking for the newest version of {PROJECT}");
        let said = finish(Path::new("pip index"), &doing, output(asking, self.cancel).await)?;
        let found = newest_of(&said).ok_or_else(|| Error::Program {
            command: "pip index".into(),
            doing,
            why: "it names no version".into(),
        })?;
        if numbers(found) <= numbers(&pinned.version) {
            return Ok((pinned.version.clone(), self.obtain(pinned).await?));
        }
        Ok((found.to_owned(), self.get(found, None).await?))
    }

    #[expect(clippy::disallowed_methods, reason = "in a command, which serves nobody")]
    async fn get(&self, version: &str, pin: Option<&Pin>) -> Result<PathBuf> {
        let Self { cache, cancel, .. } = *self;
        let hash = pin.map_or_else(String::new, |pin| format!(" --hash=sha256:{}", pin.sha256));
        let wanted = PipDownload {
            path: cache.join("sources").join(format!("{PROJECT}-{version}.tar.gz")),
            lock: format!("sdist-{version}.lock"),
            what: format!("the source of {PROJECT} {version}, some 80 MB"),
            doing: format!("downloading {PROJECT} {version}"),
            requirements: format!("--no-binary {PROJECT}\n{PROJECT}=={version}{hash}\n"),
            is_hashed: pin.is_some(),
        };
        let check = async |path: &Path| {
            let Some(pin) = pin else { return Ok(()) };
            // Found and hashed as any archive is, so the bytes are read once and then remembered.
            let (source, facts, token) = (Source::Archive(path.to_owned()), cache.to_owned(), cancel.clone());
            let examined = spawn_blocking(move || source.examine(&facts, &token)).await;
            let found = examined.unwrap_or(Err(Error::Cancelled))?.identity;
            if found == pin.identity() { Ok(()) } else { Err(pin.mismatch(path.to_owned(), found)) }
        };
        let finish = async |got: PathBuf| {
            let archive = only_file(&got)?;
            match pin {
                Some(pin) => check_sha256(&archive, &pin.sha256, cancel).await.map(|()| archive),
                None => Ok(archive),
            }
        };
        self.cached(&wanted, check, finish).await
    }

    /// Returns the path of a file in the cache. A file that is there is given to `check`; otherwise pip downloads into
    /// a work folder, `finish` makes the file of that, and it is moved to its path whole.
    ///
    /// # Errors
    ///
    /// Those of `check`, `finish` and [`Self::download`]; or it was cancelled.
    pub(crate) async fn cached(
        &self,
        wanted: &PipDownload,
        check: impl AsyncFnOnce(&Path) -> Result<()>,
        finish: impl AsyncFnOnce(PathBuf) -> Result<PathBuf>,
    ) -> Result<PathBuf> {
        let PipDownload { path, lock, what, doing, requirements, is_hashed } = wanted;
        let lock = self.cache.join("locks").join(lock);
        let _lock = Lock::take(&lock, self.cancel, || ()).await?;
        if path.exists() {
            check(path).await?;
            return Ok(path.clone());
        }
        self.reporter.tell(Event::Obtaining { what: what.clone(), from: "PyPI", into: path.clone() });

        let folder = path.parent().unwrap_or(self.cache);
        fs::create_dir_all(folder).map_err(io_error("creating", folder))?;
        let work = tempfile::Builder::new()
            .prefix(".download-")
            .tempdir_in(folder)
            .map_err(io_error("creating", folder))?;
        let got = self.download(work.path(), requirements, *is_hashed, doing).await?;
        let made = finish(got).await?;
        fs::rename(&made, path).map_err(io_error("moving", made))?;
        Ok(path.clone())
    }

    /// Has pip download what a text of requirements asks for, into a folder below `work`.
    ///
    /// # Errors
    ///
    /// There is no Python, pip fails, or it was cancelled.
    async fn download(
        &self,
        work: &Path,
        requirements: &str,
        is_hashed: bool,
        doing: &str,
    ) -> Result<PathBuf> {
        let Self { cache, env, reporter, cancel } = *self;
        let venv = Venv::new(cache);
        venv.ready(env, reporter, cancel).await?;
        let file = work.join("requirements.txt");
        fs::write(&file, requirements).map_err(io_error("writing", &file))?;
        let into = work.join("got");
        let mut download = venv.pip(env);
        download
            .args(["download", "--no-deps", "--no-build-isolation", "-r"])
            .arg(&file)
            .arg("-d")
            .arg(&into)
            .args(is_hashed.then_some("--require-hashes"))
            // An unpacked source package is some 200 MB: the cache's disk was meant for that, /tmp may be memory.
            .env("TMPDIR", work);
        finish(Path::new("pip download"), doing, output(download, cancel).await)?;
        Ok(into)
    }
}

/// The version in what `pip index versions` says: `llama-cpp-python (0.3.36)`, among other lines.
fn newest_of(said: &str) -> Option<&str> {
    let mut named =
        said.lines().filter_map(|line| line.trim().strip_prefix(PROJECT)?.trim().strip_prefix('('));
    let version = named.next()?.strip_suffix(')')?;
    // It becomes a part of a file's name and of a requirement.
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'.';
    (version.starts_with(|first: char| first.is_ascii_digit()) && version.bytes().all(is_plain))
        .then_some(version)
}

/// A version as numbers: what is no number counts as 0.
fn numbers(version: &str) -> Vec<u64> {
    version.split('.').map(|part| part.parse().unwrap_or(0)).collect()
}

fn only_file(folder: &Path) -> Result<PathBuf> {
    let mut entries = fs::read_dir(folder).map_err(io_error("reading", folder))?.flatten();
    entries.next().map(|entry| entry.path()).ok_or_else(|| Error::Program {
        command: "pip download".into(),
        doing: "downloading the source".into(),
        why: "it said it succeeded and left nothing".into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::archive::tests::{Made, tar_gz};

    fn pin(sha256: &str) -> Pin {
        Pin { version: "1.2.3".into(), sha256: sha256.into() }
    }

    async fn obtained(cache: &Path, pin: &Pin) -> Result<PathBuf> {
        let (env, reporter, cancel) =
            (&Environment::default(), &Reporter::silent(), &CancellationToken::new());
        Pip { cache, env, reporter, cancel }.obtain(pin).await
    }

    #[tokio::test]
    async fn an_archive_in_the_cache_is_used_if_its_bytes_are_the_pinned_ones() {
        let cache = tempfile::tempdir().unwrap();
        let names = ["x/CMakeLists.txt", "x/ggml/CMakeLists.txt", "x/tools/server/CMakeLists.txt"];
        let made = tar_gz(cache.path(), &names.map(|name| Made::File(name, b"")));
        let right = pin(&file_sha256(&made, &CancellationToken::new()).unwrap());
        let path = cache.path().join("sources/llama-cpp-python-1.2.3.tar.gz");
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::rename(made, &path).unwrap();
        assert_eq!(obtained(cache.path(), &right).await.unwrap(), path);
        let error = obtained(cache.path(), &pin("00")).await.unwrap_err();
        assert!(matches!(error, Error::WrongHash { .. }));
    }

    #[test]
    fn what_pip_says_is_read_and_nothing_else_becomes_a_name() {
        let said = "WARNING: pip index is experimental.\nllama-cpp-python (0.10.2)\nAvailable versions: 0.10.2, 0.9\n  INSTALLED: 0.9\n";
        assert_eq!(newest_of(said), Some("0.10.2"));
        for wrong in [
            "",
            "llama-cpp-python",
            "llama-cpp-python ()",
            "llama-cpp-python (../x)",
            "llama-cpp-python (1 ; y)",
        ] {
            assert_eq!(newest_of(wrong), None, "{wrong}");
        }
        assert!(numbers("0.10.2") > numbers("0.9.9") && numbers("0.3.36") <= numbers("0.3.36"));
    }

    #[tokio::test]
    async fn without_python_the_package_is_named() {
        let cache = tempfile::tempdir().unwrap();
        let error = obtained(cache.path(), &pin("00")).await.unwrap_err();
        assert_eq!(error.hint().unwrap(), "install it: apt install python3 python3-venv");
    }
}
