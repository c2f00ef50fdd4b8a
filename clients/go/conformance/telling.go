package main

import (
	"errors"
	"strconv"
	"strings"

	mlxstream "github.com/mlx-stream/mlx-stream/clients/go"
	v1 "github.com/mlx-stream/mlx-stream/clients/go/v1"
	"google.golang.org/grpc/codes"
)

var codeNames = map[codes.Code]string{
	codes.Canceled: "CANCELLED", codes.Unknown: "UNKNOWN", codes.InvalidArgument: "INVALID_ARGUMENT",
	codes.DeadlineExceeded: "DEADLINE_EXCEEDED", codes.NotFound: "NOT_FOUND", codes.AlreadyExists: "ALREADY_EXISTS",
	codes.PermissionDenied: "PERMISSION_DENIED", codes.ResourceExhausted: "RESOURCE_EXHAUSTED",
	codes.FailedPrecondition: "FAILED_PRECONDITION", codes.Aborted: "ABORTED", codes.OutOfRange: "OUT_OF_RANGE",
	codes.Unimplemented: "UNIMPLEMENTED", codes.Internal: "INTERNAL", codes.Unavailable: "UNAVAILABLE",
	codes.DataLoss: "DATA_LOSS", codes.Unauthenticated: "UNAUTHENTICATED",
}

func tell(err error) any {
	if err == nil {
		return nil
	}
	var failure *mlxstream.Error
	if !errors.As(err, &failure) {
		return answer{"kind": "program", "message": err.Error()}
	}
	violations := []string{}
	for _, violation := range failure.Violations {
		violations = append(violations, violation.GetField())
	}
	told := answer{
		"kind": failure.Kind, "code": codeNames[failure.Code], "reason": failure.Reason, "message": failure.Message,
		"violations": violations, "metadata": failure.Metadata, "retry_after_seconds": nil,
	}
	if failure.RetryAfter > 0 {
		told["retry_after_seconds"] = failure.RetryAfter.Seconds()
	}
	return told
}

func kindOf(err error) mlxstream.Kind {
	var failure *mlxstream.Error
	if errors.As(err, &failure) {
		return failure.Kind
	}
	return mlxstream.Server
}

func tellUsage(usage mlxstream.Usage) answer {
	return answer{
		"prompt_tokens":    usage.PromptTokens,
		"cached_tokens":    usage.CachedTokens,
		"generated_tokens": usage.GeneratedTokens,
	}
}

// tellReason names why a generation ended; a value that this client does not know counts as unspecified.
func tellReason(finished *v1.Finished) any {
	if finished == nil {
		return nil
	}
	name, known := v1.FinishReason_name[int32(finished.GetFinishReason())]
	if !known {
		return "unspecified"
	}
	return strings.ToLower(strings.TrimPrefix(name, "FINISH_REASON_"))
}

func tellStarted(started *v1.Started) any {
	if started == nil {
		return nil
	}
	options := started.GetOptions()
	return answer{
		"model":             started.GetModel(),
		"seed_was_explicit": started.GetSeedWasExplicit(),
		"seed":              decimal(options.GetSeed()),
		"temperature":       options.GetTemperature(),
		"top_p":             options.GetTopP(),
		"top_k":             options.GetTopK(),
		"max_tokens":        options.GetMaxTokens(),
		"resumed_tokens":    started.GetResumedTokens(),
	}
}

func decimal(value uint64) string { return strconv.FormatUint(value, 10) }
