//! The kind and hint of every error, as users see them.

use warden_patches::SetRefusal;

use super::*;
use crate::git::fault::GitError;

fn faults() -> Vec<GitError> {
    let url = || "https://git.example/llama.cpp".to_owned();
    let unreachable = |why: &str| GitError::Unreachable {
        host: "git.example".into(),
        reference: "master".into(),
        why: why.into(),
    };
    let nothing = |reference: &str, similar: &[&str]| GitError::NoSuchReference {
        repository: url(),
        reference: reference.into(),
        similar: similar.iter().map(|&name| name.to_owned()).collect(),
    };
    let repository = |repository: &str| GitError::Repository {
        doing: "opening",
        repository: repository.into(),
        why: "odd".into(),
    };
    vec![
        GitError::Source {
            text: "nowhere".into(),
            why: "it is neither a name nor a path".into(),
            names: vec!["upstream".into(), "ik".into()],
        },
        unreachable("the certificate is not trusted"),
        unreachable("no route to host"),
        GitError::Refused { url: url(), why: "authentication failed".into() },
        GitError::NoGit,
        GitError::TooLarge { url: url(), most: 4096 },
        GitError::Offline { url: url(), reference: "b9000".into() },
        nothing("b9999", &["b9998", "b9997"]),
        nothing("0c1e570", &[]),
        GitError::Ambiguous { repository: url(), reference: "0c1".into() },
        GitError::Missing {
            repository: "/src/llama.cpp".into(),
            path: "ggml/src/ggml.c".into(),
            commit: "0c1e5709".into(),
        },
        GitError::Unsafe { commit: "0c1e5709".into(), entry: "../x".into(), why: "leads out of the folder" },
        GitError::Range { repository: url(), from: "b2".into(), to: "b1".into(), why: "is empty" },
        GitError::NoRepository { path: "/src".into() },
        repository("/src/llama.cpp"),
        repository(&url()),
    ]
}

fn errors() -> Vec<BuilderError> {
    let path = || PathBuf::from("/src/x.tar.gz");
    let build = |killed, no_room| BuilderError::Build {
        phase: "compiling",
        excerpt: "a.cpp:3: error: `x` was not declared".into(),
        log: "/cache/build.log".into(),
        killed,
        no_room,
    };
    let kernel = |right: &[&'static str], repacked_alone| BuilderError::Kernel {
        weights: "q4_0",
        setting: "repacked",
        why: "the server ended with signal: 11 (SIGSEGV)".into(),
        right: right.to_vec(),
        repacked_alone,
    };
    let verify = |why: &str, illegal_instruction| BuilderError::Verify {
        check: "health",
        why: why.into(),
        illegal_instruction,
    };
    let loader = "the server ended\nx: error while loading shared libraries: libcublas.so.13: cannot open";
    let refusal =
        SetRefusal { set: "server".into(), unverified: true, reasons: vec!["a.cpp:3: moved".into()] };
    let id = |digit: &str| digit.repeat(16).parse().unwrap();
    let io = |source: io::Error| io_error("writing", "/store/x")(source);
    vec![
        BuilderError::SourceMissing { path: path() },
        BuilderError::NotAnArchive { path: path(), why: "it is a picture".into() },
        BuilderError::NoLlamaCpp { path: path(), top: vec!["README".into(), "src".into()] },
        BuilderError::UnsafeArchive { path: path(), entry: "../x".into(), why: "leads out of the folder" },
        BuilderError::ArchiveTooLarge { path: path(), limit: "200000 entries".into() },
        BuilderError::MissingProgram { program: "a C++ compiler".into(), package: "g++" },
        BuilderError::Program {
            command: "cmake --version".into(),
            doing: "asking for its version".into(),
            why: "odd".into(),
        },
        BuilderError::Disk { path: "/store".into(), free: 100, need: 2000 },
        BuilderError::Memory { available: 100, need: 1500 },
        BuilderError::Option { option: "GGML_CUDA=ON".into(), why: "that is what --backend is for" },
        BuilderError::Toolkit {
            backend: ComputeBackend::Cuda,
            missing: "there is no nvcc in PATH".into(),
            cure: "install CUDA's toolkit".into(),
        },
        "gpu".parse::<crate::plan::BackendChoice>().unwrap_err(),
        "portable,".parse::<crate::plan::ArchChoice>().unwrap_err(),
        "native,portable".parse::<crate::plan::ArchChoice>().unwrap_err(),
        "90,gfx1201".parse::<crate::plan::ArchChoice>().unwrap_err(),
        BuilderError::Patches(warden_patches::PatchError::Refused(vec![refusal])),
        BuilderError::SourceChanged { path: path() },
        BuilderError::Markers { fixes: vec!["pool-purge".into(), "hook `end` of cuda-memory".into()] },
        build(false, false),
        build(true, true),
        build(false, true),
        verify("it answered 500", false),
        verify(loader, false),
        verify("it died of signal 4 (SIGILL)", true),
        kernel(&["--no-repack"], true),
        kernel(&[], false),
        BuilderError::WrongHash { path: path(), found: "00".into(), expected: "11".into() },
        BuilderError::BundledBuild { id: "90b6".into(), folder: "/prefix/lib/90b6".into() },
        BuilderError::NoSuchBuild { id: "90b6".into(), store: "/store".into() },
        BuilderError::AmbiguousBuild { prefix: "9".into(), ids: vec![id("a"), id("b")] },
        BuilderError::DamagedChoices { path: "/store/.chosen.json".into(), why: "it is no JSON".into() },
        BuilderError::NoWayBack { store: "/store".into() },
        BuilderError::DamagedBuild { path: "/store/90b6".into(), why: "it has no provenance.json".into() },
        BuilderError::ForeignInBuild {
            path: "/store/90b6".into(),
            why: "there is a folder `mine` in it".into(),
        },
        io(io::ErrorKind::StorageFull.into()),
        io(io::Error::other("the kernel said no")),
        BuilderError::Cancelled,
    ]
}

#[test]
fn every_error_is_told_with_its_kind_and_its_cure() {
    let all = errors().into_iter().chain(faults().into_iter().map(BuilderError::Git));
    let told = all.map(|error| {
        let hint = error.hint().map(|hint| format!("    hint: {hint}\n")).unwrap_or_default();
        format!("{:?}: {error}\n{hint}", error.kind())
    });
    insta::assert_snapshot!(told.collect::<String>());
}

#[test]
fn what_may_go_well_with_more_room_is_known() {
    let room: Vec<String> =
        errors().iter().filter(|error| error.ran_out_of_space()).map(ToString::to_string).collect();
    assert_eq!(room.len(), 5, "disk, memory, two builds and a file: {room:#?}");
    let program = |why: &str| BuilderError::Program {
        command: "ninja".into(),
        doing: "compiling".into(),
        why: why.into(),
    };
    assert!(program("Resource temporarily unavailable (os error 11)").ran_out_of_space());
    assert!(!program("No such file or directory (os error 2)").ran_out_of_space());
}

#[test]
fn an_error_of_a_tree_of_ours_comes_back_from_judging_as_it_was() {
    let error = BuilderError::from(warden_patches::PatchError::from(BuilderError::Cancelled));
    assert!(matches!(error, BuilderError::Cancelled), "{error}");
    let refused = BuilderError::from(warden_patches::PatchError::Refused(Vec::new()));
    assert_eq!(refused.kind(), ErrorClass::Refused);
}

#[test]
fn a_long_list_of_names_is_cut() {
    let names: Vec<String> = (0..20).map(|number| number.to_string()).collect();
    assert_eq!(join_names(&names), "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 8 more");
    assert_eq!(join_names::<String>(&[]), "nothing");
}
