//! Obtains the source archive of llama-cpp-python through pip: a copy of llama.cpp that any Python index
//! can serve.
//!
//! The caller pins version and hash, so the source is the same from any index. Before a download, pip asks
//! the package's build backend for metadata. The backend is installed first, without build isolation: an
//! isolated backend would have to build cmake.

use std::fs;
use std::path::{Path, PathBuf};

use crate::builder::Builder;
use crate::error::{BuilderError, Result, io_error, program_error};
use crate::event::BuildEvent;
use crate::lock::FileLock;
use crate::source::{BuildSource, file_sha256};
use crate::toolchain::venv;

const PACKAGE_NAME: &str = "llama-cpp-python";

/// A pinned archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SdistPin {
    /// Package version, such as `0.3.36`.
    pub version: String,
    /// sha256 of the archive, 64 hexadecimal digits.
    pub sha256: String,
}

pub(crate) struct PipDownload {
    pub(crate) path: PathBuf,
    /// Name of the lock that keeps other processes from fetching the same file.
    pub(crate) lock: String,
    pub(crate) what: String,
    pub(crate) doing: String,
    pub(crate) requirements: String,
    /// Each requirement has a hash, and pip must require hashes.
    pub(crate) is_hashed: bool,
    /// The requirements are wheels, for which pip needs no build tools.
    pub(crate) is_wheel: bool,
}

impl Builder {
    /// Returns the pinned llama-cpp-python source archive, from the cache or through pip (some 80 MB).
    ///
    /// # Errors
    /// Fails on cancellation, if pip cannot fetch the archive, or if the hash differs from the pinned one.
    pub async fn sdist(&self, pin: &SdistPin) -> Result<PathBuf> {
        self.fetch_sdist(&pin.version, Some(pin)).await
    }

    /// Returns the newest llama-cpp-python archive that pip finds, or the pinned one, with its version.
    ///
    /// # Errors
    /// Fails if pip cannot name the newest version or cannot fetch it, or on cancellation.
    pub async fn newest_sdist(&self, pinned: &SdistPin) -> Result<(String, PathBuf)> {
        let tools = venv::ensure_created(self).await?;
        let mut asking = venv::pip(self, &tools);
        // `-v` cancels the `-q` of our pip calls, which would suppress the versions.
        asking.args(["-v", "index", "versions", "--no-binary", PACKAGE_NAME, PACKAGE_NAME]);
        let doing = format!("asking for the newest version of {PACKAGE_NAME}");
        let said = self.run_program("pip index".as_ref(), &doing, asking).await?;
        let found =
            parse_newest(&said).ok_or_else(|| program_error("pip index", &doing, "it names no version"))?;
        if version_numbers(found) <= version_numbers(&pinned.version) {
            return Ok((pinned.version.clone(), self.sdist(pinned).await?));
        }
        Ok((found.to_owned(), self.fetch_sdist(found, None).await?))
    }

    async fn fetch_sdist(&self, version: &str, pin: Option<&SdistPin>) -> Result<PathBuf> {
        let hash = pin.map_or_else(String::new, |pin| format!(" --hash=sha256:{}", pin.sha256));
        let wanted = PipDownload {
            path: self.dirs.cache.join("sources").join(format!("{PACKAGE_NAME}-{version}.tar.gz")),
            lock: format!("sdist-{version}.lock"),
            what: format!("the source of {PACKAGE_NAME} {version}, some 80 MB"),
            doing: format!("downloading {PACKAGE_NAME} {version}"),
            requirements: format!("--no-binary {PACKAGE_NAME}\n{PACKAGE_NAME}=={version}{hash}\n"),
            is_hashed: pin.is_some(),
            is_wheel: false,
        };
        let check = async |path: &Path| {
            let Some(pin) = pin else { return Ok(()) };
            // Examine this archive like any other: the result is cached, and the bytes are read once.
            let (source, cache) = (BuildSource::Archive(path.to_owned()), self.dirs.cache.clone());
            let found = self.run_blocking(move |cancel| source.examine(&cache, &cancel)).await?.identity;
            let expected = pin.sha256.clone();
            if found == format!("archive-sha256:{expected}") {
                return Ok(());
            }
            Err(BuilderError::WrongHash { path: path.to_owned(), found, expected })
        };
        let finish = async |got: PathBuf| {
            let archive = only_file(&got)?;
            if let Some(pin) = pin {
                self.check_sha256(&archive, &pin.sha256).await?;
            }
            Ok(archive)
        };
        self.cached_download(&wanted, check, finish).await
    }

    pub(crate) async fn check_sha256(&self, path: &Path, expected: &str) -> Result<()> {
        let file = path.to_owned();
        let found = self.run_blocking(move |cancel| file_sha256(&file, &cancel)).await?;
        if found == expected {
            return Ok(());
        }
        Err(BuilderError::WrongHash { path: path.to_owned(), found, expected: expected.to_owned() })
    }

    /// Returns the path of a cached file, after `check` accepts it. If there is none, pip downloads into a
    /// work folder, and `finish` makes the file from the download.
    pub(crate) async fn cached_download(
        &self,
        wanted: &PipDownload,
        check: impl AsyncFnOnce(&Path) -> Result<()>,
        finish: impl AsyncFnOnce(PathBuf) -> Result<PathBuf>,
    ) -> Result<PathBuf> {
        let (path, cache) = (&wanted.path, &self.dirs.cache);
        let _lock = FileLock::take(&cache.join("locks").join(&wanted.lock), &self.cancel, || ()).await?;
        if path.exists() {
            check(path).await?;
            return Ok(path.clone());
        }
        self.reporter.report(BuildEvent::Obtaining {
            what: wanted.what.clone(),
            from: "PyPI",
            into: path.clone(),
        });

        let folder = path.parent().unwrap_or(cache);
        fs::create_dir_all(folder).map_err(io_error("creating", folder))?;
        let work = tempfile::Builder::new()
            .prefix(".download-")
            .tempdir_in(folder)
            .map_err(io_error("creating", folder))?;
        let made = finish(self.download(work.path(), wanted).await?).await?;
        fs::rename(&made, path).map_err(io_error("moving", made))?;
        Ok(path.clone())
    }

    async fn download(&self, work: &Path, wanted: &PipDownload) -> Result<PathBuf> {
        let tools =
            if wanted.is_wheel { venv::ensure_pip(self).await? } else { venv::ensure_created(self).await? };
        let file = work.join("requirements.txt");
        fs::write(&file, &wanted.requirements).map_err(io_error("writing", &file))?;
        let into = work.join("got");
        let mut download = venv::pip(self, &tools);
        download
            .args(["download", "--no-deps", "--no-build-isolation", "-r"])
            .arg(&file)
            .arg("-d")
            .arg(&into)
            .args(wanted.is_hashed.then_some("--require-hashes"))
            // An unpacked source package has some 200 MB: the cache's disk has room for it, /tmp may be in
            // memory.
            .env("TMPDIR", work);
        self.run_program("pip download".as_ref(), &wanted.doing, download).await?;
        Ok(into)
    }
}

/// Finds the version in the output of `pip index versions`: `llama-cpp-python (0.3.36)`, among other lines.
fn parse_newest(said: &str) -> Option<&str> {
    let mut named =
        said.lines().filter_map(|line| line.trim().strip_prefix(PACKAGE_NAME)?.trim().strip_prefix('('));
    let version = named.next()?.strip_suffix(')')?;
    // The version becomes part of a file name and of a requirement.
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'.';
    (version.starts_with(|first: char| first.is_ascii_digit()) && version.bytes().all(is_plain))
        .then_some(version)
}

/// A version as numbers; parts that are no numbers count as 0.
fn version_numbers(version: &str) -> Vec<u64> {
    version.split('.').map(|part| part.parse().unwrap_or(0)).collect()
}

fn only_file(folder: &Path) -> Result<PathBuf> {
    let mut entries = fs::read_dir(folder).map_err(io_error("reading", folder))?.flatten();
    let why = "it said it succeeded and left nothing";
    let missing = || program_error("pip download", "downloading the source", why);
    entries.next().map(|entry| entry.path()).ok_or_else(missing)
}

#[cfg(test)]
mod tests {
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::archive::tests::{Made, tar_gz};
    use crate::build::tests::builder_with;
    use crate::environment::BuildEnvironment;

    fn pin(sha256: &str) -> SdistPin {
        SdistPin { version: "1.2.3".into(), sha256: sha256.into() }
    }

    async fn obtained(cache: &Path, pin: &SdistPin) -> Result<PathBuf> {
        builder_with(BuildEnvironment::default(), cache).sdist(pin).await
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
        assert!(matches!(error, BuilderError::WrongHash { .. }));
    }

    #[test]
    fn what_pip_says_is_read_and_nothing_else_becomes_a_name() {
        let said = "WARNING: pip index is experimental.\nllama-cpp-python (0.10.2)\nAvailable versions: 0.10.2, 0.9\n  INSTALLED: 0.9\n";
        assert_eq!(parse_newest(said), Some("0.10.2"));
        for wrong in [
            "",
            "llama-cpp-python",
            "llama-cpp-python ()",
            "llama-cpp-python (../x)",
            "llama-cpp-python (1 ; y)",
        ] {
            assert_eq!(parse_newest(wrong), None, "{wrong}");
        }
        assert!(
            version_numbers("0.10.2") > version_numbers("0.9.9")
                && version_numbers("0.3.36") <= version_numbers("0.3.36")
        );
    }

    #[tokio::test]
    async fn without_python_the_package_is_named() {
        let cache = tempfile::tempdir().unwrap();
        let error = obtained(cache.path(), &pin("00")).await.unwrap_err();
        assert_eq!(error.hint().unwrap(), "install it: apt install python3 python3-venv");
    }
}
